"""Deployments in front of a provider that differ in their settings, start late or end early."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator

import httpx
import pytest

from reef.config import resolve
from reef.service.app import build
from tests.service.conftest import running
from tests.service.providers import STREAM_HEAD, FakeProvider, ask, chunk, hang, in_front, message, piece, reply

KEY = "sk-very-secret"
ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeProvider]:
    found = FakeProvider()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", "/v1/messages"),
        ("/", "/v1/messages"),
        ("/v1", "/v1/messages"),
        ("/api/v1/", "/api/v1/messages"),
        ("/v1beta/openai", "/v1beta/openai/messages"),
        ("/anthropic", "/anthropic/v1/messages"),
    ],
)
def test_the_path_of_the_url_comes_first(provider, tmp_path, path, expected):
    provider.answer = reply({})
    with in_front(provider.url + path, tmp_path) as reef:
        ask(reef, "/v1/messages")
    assert provider.heads[-1].startswith(f"POST {expected} HTTP/1.1\r\n")


def test_a_model_may_be_renamed_and_nothing_else_changes(provider, tmp_path):
    provider.answer = reply({})
    with in_front(provider.url, tmp_path, upstream_model="theirs") as reef:
        ask(reef, content=b'{"model":"m","n": 1.50,"a":{"model": "m"}}')
        assert provider.bodies[-1] == b'{"model":"theirs","n":1.50,"a":{"model": "m"}}'
        assert json.loads(reef.records("s")[-1]["request"])["model"] == "m"


def test_without_a_key_of_its_own_the_clients_goes_along_unless_it_is_a_token(provider, tmp_path):
    provider.answer = reply({})
    with in_front(provider.url, tmp_path / "open") as reef:
        ask(reef, authorization="Bearer client-key")
        assert provider.headers()["authorization"] == "Bearer client-key"
    with in_front(provider.url, tmp_path / "closed", tokens=["token"]) as reef:
        assert ask(reef, authorization="Bearer token").status_code == 200
        assert "authorization" not in provider.headers()


def test_a_provider_of_one_api_is_not_asked_in_the_other(provider, tmp_path):
    provider.answer = reply({})
    with in_front(provider.url, tmp_path / "o", upstream_api="openai", upstream_api_key=KEY) as reef:
        refusal = ask(reef, "/v1/messages")
        assert refusal.status_code == 404 and refusal.json()["type"] == "error" and "openai only" in message(refusal)
        assert reef.http.get("/v1/models", headers={"anthropic-version": "1"}).status_code == 200
        assert provider.headers()["authorization"] == f"Bearer {KEY}"
    with in_front(provider.url, tmp_path / "a", upstream_api="anthropic", upstream_api_key=KEY) as reef:
        assert ask(reef).status_code == 404
        assert ask(reef, "/v1/messages").status_code == 200
        assert provider.headers()["x-api-key"] == KEY


def test_shutdown_cuts_and_records_what_runs(provider, tmp_path):
    async def script(reader, writer):
        writer.write(STREAM_HEAD + chunk(piece("a")))
        await asyncio.sleep(600)

    provider.answer = script
    config = resolve(environ={}, flags={"inference.upstream-url": provider.url, "reef.data-dir": str(tmp_path)}).config
    with running(build(config), shutdown_grace=0.1) as reef, reef.http.stream("POST", ROUTES[0], json={}) as answer:
        seen = answer.iter_raw()
        next(seen)
        reef.server.should_exit = True
        assert b"shutting down" in b"".join(seen)
    provider.answer = reply({})
    with running(build(config)) as reef:
        assert [found["ending"] for record in reef.records() for found in record["generations"]] == ["engine_cut"]


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """Has its port, so that nobody else takes it, and refuses connections until it listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield found


def test_a_refused_connection_is_a_502_and_creates_nothing(tmp_path, deaf):
    with in_front(f"http://127.0.0.1:{deaf.getsockname()[1]}", tmp_path) as reef:
        for route in ROUTES:
            answer = ask(reef, route)
            assert answer.status_code == 502 and "cannot connect to the provider" in message(answer)
        assert reef.http.get("/v1/models").status_code == 502
        assert reef.scenarios() == ["default"] and reef.http.get("/healthz").status_code == 200


def test_a_connection_that_is_refused_is_tried_again(tmp_path, deaf):
    url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
    with in_front(url, tmp_path, upstream_connect_retries="10", upstream_connect_timeout="100") as reef:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(ask(reef)))
        asking.start()
        threading.Event().wait(0.3)

        async def late() -> None:
            async def serve(reader, writer):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(reply({}))
                await writer.drain()

            server = await asyncio.start_server(serve, sock=deaf)
            while asking.is_alive():
                await asyncio.sleep(0.01)
            server.close()

        asyncio.run(asyncio.wait_for(late(), 100))
        assert [answer.status_code for answer in answers] == [200]


def test_more_requests_than_connections_wait_and_are_told_when_it_takes_too_long(provider, tmp_path):
    provider.answer = hang
    with in_front(provider.url, tmp_path, upstream_connections="1") as reef:
        pool = reef.deployment._handler._pool
        first = threading.Thread(target=lambda: ask(reef))
        before = len(provider.bodies)
        first.start()
        while len(provider.bodies) == before:
            threading.Event().wait(0.01)
        patient, pool._connect_timeout = pool._connect_timeout, 0.2
        second = ask(reef)
        pool._connect_timeout = patient
        assert second.status_code == 503 and "in use" in message(second) and "retry-after" in second.headers
        pool.close()
        first.join(60)
        provider.answer = reply({})
        assert ask(reef).status_code == 200


def test_shutdown_tells_who_waits_for_a_whole_answer(provider, tmp_path):
    provider.answer = hang
    config = resolve(environ={}, flags={"inference.upstream-url": provider.url, "reef.data-dir": str(tmp_path)}).config
    answers: list[httpx.Response] = []
    with running(build(config), shutdown_grace=0.1) as reef:
        asking = threading.Thread(target=lambda: answers.append(ask(reef)))
        before = len(provider.bodies)
        asking.start()
        while len(provider.bodies) == before:
            threading.Event().wait(0.01)
        reef.server.should_exit = True
        asking.join(60)
    assert [answer.status_code for answer in answers] == [503] and "shutting down" in message(answers[0])


def test_a_provider_with_tls_is_asked_if_its_certificate_is_trusted(tmp_path, monkeypatch):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        key,
        "-out",
        certificate,
    ]
    try:
        subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=100)
    except OSError:
        pytest.skip("there is no openssl to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    provider = FakeProvider(context)
    provider.answer = reply({"said": 1})
    url = f"https://localhost:{provider.port}"
    with in_front(url, tmp_path / "stranger", upstream_connect_retries="0") as reef:
        assert ask(reef).status_code == 502 and provider.bodies == []
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with in_front(url, tmp_path / "trusted") as reef:
        assert [ask(reef).json() for _ in range(2)] == [{"said": 1}] * 2
    assert provider.headers()["host"] == f"localhost:{provider.port}"
    provider.close()


@pytest.mark.parametrize(
    ("route", "content", "field"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x, y"}] * 4}, "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x, y"}] * 4}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [{}] * 4}, "messages"),
        ("/v1/responses", {"input": [{}] * 4}, "input"),
        ("/v1/completions", {"prompt": ["x"] * 4}, "prompt"),
        ("/v1/completions", {"prompt": [[1], [2], [3], [4]]}, "prompt"),
    ],
)
def test_messages_over_the_limit_are_not_sent(provider, tmp_path, route, content, field):
    provider.answer = reply({})
    with in_front(provider.url, tmp_path, settings={"max_messages": 3}) as reef:
        before = len(provider.heads)
        answer = ask(reef, route, json.dumps(content).encode())
        assert answer.status_code == 413 and "at most 3 messages, got 4" in message(answer)
        assert field in answer.text and answer.headers["retry-after"] == "60" and len(provider.heads) == before
        fewer = {field: content[field][1:]}
        assert ask(reef, route, json.dumps(fewer).encode()).status_code == 200
        others = {"prompt": [1, 2, 3, 4, 5], "messages": 5, "input": "a,b,c,d"}
        assert ask(reef, route, json.dumps(others).encode()).status_code == 200
