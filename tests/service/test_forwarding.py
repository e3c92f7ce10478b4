"""A Reef in front of a scripted provider: what passes, what is recorded, and what a client sees when it goes wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from reef.config import resolve
from reef.errors import ConfigError
from reef.runtime.interfaces import HeaderProvider
from tests.service.conftest import Running
from tests.service.providers import (
    DONE,
    END,
    STREAM_HEAD,
    USAGE,
    FakeProvider,
    ask,
    chunk,
    event,
    hang,
    hang_up,
    in_front,
    message,
    piece,
    reply,
)

KEY = "sk-very-secret"
ANSWER = b'{"id": "x",  "usage": {"total_tokens": 5}, "spaces":  "kept\\u00e9"}'
ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]


class Signature(HeaderProvider):
    def headers(self, request):
        return {"x-signed": f"{request.lane} {request.path} {len(request.body)}", "user-agent": "replaced"}


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeProvider]:
    found = FakeProvider()
    yield found
    found.close()


@pytest.fixture(scope="module")
def reef(provider, tmp_path_factory) -> Iterator[Running]:
    with in_front(
        provider.url,
        tmp_path_factory.mktemp("reef"),
        upstream_api_key=KEY,
        header_providers=f"{__name__}:Signature",
    ) as found:
        yield found


@contextmanager
def impatient(reef: Running) -> Iterator[None]:
    """As with upstream-timeout 0.2: only where silence is meant, since a busy machine is silent now and then."""
    pool = reef.deployment._handler._pool
    patient, pool._timeout = pool._timeout, 0.2
    try:
        yield
    finally:
        pool._timeout = patient


def newest(reef: Running) -> dict:
    return reef.records("s", limit=1000)[-1]


def stored(reef: Running) -> int:
    return len(reef.records("s", limit=1000))


# ---------------------------------------------------------------------------------------------- what passes


@pytest.mark.parametrize("route", ROUTES)
def test_bytes_pass_both_ways_and_are_recorded(reef, provider, route):
    provider.answer = reply(ANSWER, x_request_id="req-9", x_ratelimit_left="3", set_cookie="a=b")
    body = b'{"model": "m",   "odd": [1e400, "\\u00e9"], "stream": "yes"}'
    answer = ask(reef, route, body, x_request_id="mine", anthropic_beta="b-1", cookie="c=d", x_reef_tag_run="7")
    assert (answer.status_code, answer.content) == (200, ANSWER)
    assert answer.headers["x-request-id"] == "req-9" and answer.headers["x-ratelimit-left"] == "3"
    assert "set-cookie" not in answer.headers
    assert provider.bodies[-1] == body and provider.heads[-1].startswith(f"POST {route} HTTP/1.1\r\n")
    sent = provider.headers()
    assert (sent["x-request-id"], sent["anthropic-beta"]) == ("mine", "b-1")
    assert "cookie" not in sent and not any(name.startswith("x-reef-") for name in sent)
    record = newest(reef)
    assert record["agent_record_id"] == answer.headers["x-reef-agent-record-id"] and record["tags"] == {"run": "7"}
    assert (record["request"].encode(), record["response"].encode()) == (body, ANSWER)
    assert (record["status"], record["generations"], record["route"]) == (200, [], route)


@pytest.mark.parametrize(
    ("route", "header", "value"), [(ROUTES[0], "authorization", f"Bearer {KEY}"), (ROUTES[3], "x-api-key", KEY)]
)
def test_the_configured_key_takes_the_place_of_the_clients(reef, provider, route, header, value):
    provider.answer = reply({})
    ask(reef, route, authorization="Bearer theirs", x_api_key="theirs")
    sent = provider.headers()
    assert sent[header] == value and "theirs" not in provider.heads[-1]
    assert len({"authorization", "x-api-key"} & sent.keys()) == 1


def test_header_providers_have_the_last_word(reef, provider):
    provider.answer = reply({})
    ask(reef, user_agent="original")
    sent = provider.headers()
    assert sent["x-signed"] == "s /v1/chat/completions 13" and sent["user-agent"] == "replaced"
    assert provider.heads[-1].lower().count("user-agent") == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models?limit=2"),
        ("GET", "/v1/models/org%2Fname%20x"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/input_items?limit=2"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/v1/messages/count_tokens?beta=true"),
    ],
)
def test_what_is_not_an_answer_passes_and_is_not_recorded(reef, provider, method, path):
    provider.answer = reply(ANSWER, x_request_id="req-1")
    before = stored(reef)
    answer = reef.http.request(method, path, json={} if method == "POST" else None, headers={"x-reef-scenario": "s"})
    assert (answer.status_code, answer.content, answer.headers["x-request-id"]) == (200, ANSWER, "req-1")
    assert provider.heads[-1].startswith(f"{method} {path} HTTP/1.1\r\n")
    assert stored(reef) == before and "x-reef-agent-record-id" not in answer.headers


def test_a_body_without_a_length_is_not_the_next_request(reef, provider):
    provider.answer = reply({})
    hidden = b"GET /v1/files HTTP/1.1\r\nhost: x\r\nx-rest: "
    for method in ("GET", "DELETE"):
        assert reef.http.request(method, "/v1/responses/resp_1", content=hidden).status_code == 200
        assert provider.heads[-1].startswith(f"{method} /v1/responses/resp_1 ")
        before = len(provider.heads)
        ask(reef)
        assert len(provider.heads) == before + 1 and provider.heads[-1].startswith("POST /v1/chat/completions ")


def test_head_is_refused_and_not_sent(reef, provider):
    before = len(provider.heads)
    assert reef.http.head("/v1/models").status_code == 405
    assert len(provider.heads) == before


def test_connections_are_kept(reef, provider):
    provider.answer = reply({})
    ask(reef)
    before = provider.connections
    for _ in range(5):
        ask(reef)
    assert provider.connections == before


# ---------------------------------------------------------------------------------------------- streams


def streamed(*parts: bytes, end: bytes = END) -> bytes:
    return STREAM_HEAD + b"".join(map(chunk, parts)) + end


def test_a_stream_passes_as_it_comes_with_the_receipt_in_its_last_regular_event(reef, provider):
    gate = threading.Event()

    async def script(reader, writer):
        writer.write(STREAM_HEAD + chunk(piece("a")))
        while not gate.is_set():
            await asyncio.sleep(0.01)
        writer.write(
            chunk(piece("b") + piece(finish="stop")[:20]) + chunk(piece(finish="stop")[20:] + USAGE + DONE) + END
        )

    provider.answer = script
    with reef.http.stream("POST", ROUTES[0], json={}, headers={"x-reef-scenario": "s"}) as answer:
        receipt = answer.headers["x-reef-agent-record-id"]
        seen = answer.iter_raw()
        first = next(seen)
        assert first == piece("a")
        gate.set()
        whole = first + b"".join(seen)
    last = piece(finish="stop")[:-3] + b',"reef":{"agent_record_id":"' + receipt.encode() + b'"}}\n\n'
    assert whole == piece("a") + piece("b") + last + USAGE + DONE
    record = newest(reef)
    assert (record["response"].encode(), record["agent_record_id"]) == (whole, receipt)
    assert record["generations"] == []


@pytest.mark.parametrize("cut", [END, b""], ids=["closed", "broken off"])
def test_a_stream_without_its_terminal_event_is_recorded_incomplete_and_never_trains(reef, provider, cut):
    async def script(reader, writer):
        writer.write(streamed(piece("a"), piece("b"), b'data: {"cho', end=cut))
        writer.close()

    provider.answer = script
    answer = ask(reef)
    record = newest(reef)
    assert record["response"].encode() == answer.content
    assert [generation["ending"] for generation in record["generations"]] == ["engine_cut"]
    if cut:  # just as the provider said it
        assert answer.content == piece("a") + piece("b") + b'data: {"cho'
    else:
        assert answer.content.startswith(piece("a") + piece("b") + b'data: {"error":{"message":"the provider closed')
    reported = reef.http.post(
        "/reef/report", json={"references": [record["agent_record_id"]], "score": 1}, headers={"x-reef-scenario": "s"}
    )
    assert reported.status_code == 200


@pytest.mark.parametrize(("route", "mark"), [("/v1/messages", b"event: error\n"), ("/v1/responses", b"event: error\n")])
def test_a_stream_that_stalls_ends_with_an_error_of_its_api(reef, provider, route, mark):
    async def script(reader, writer):
        writer.write(STREAM_HEAD + chunk(event({"type": "ping"}, "ping")))
        await asyncio.sleep(600)

    provider.answer = script
    with reef.http.stream("POST", route, json={}, headers={"x-reef-scenario": "s"}) as answer:
        seen = answer.iter_raw()
        content = next(seen)
        with impatient(reef):
            content += b"".join(seen)
    assert content.startswith(event({"type": "ping"}, "ping") + mark)
    assert b"sent nothing for 0.2 s" in content
    assert newest(reef)["response"].encode() == content


def test_a_client_that_leaves_ends_the_request_and_is_recorded(reef, provider):
    left = threading.Event()

    async def script(reader, writer):
        writer.write(STREAM_HEAD + chunk(piece("a")))
        await reader.read()  # until Reef hangs up
        left.set()

    provider.answer = script
    before = stored(reef)
    with reef.http.stream("POST", ROUTES[0], json={}, headers={"x-reef-scenario": "s"}) as answer:
        next(answer.iter_raw())
    assert left.wait(60)
    record = reef.wait_for_records(before + 1, "s")[-1]
    assert [generation["ending"] for generation in record["generations"]] == ["client_left"]
    assert record["response"].encode() == piece("a")


# ---------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_the_providers_status_and_message_reach_the_client_and_nothing_is_recorded(reef, provider, status):
    said = b'{"error": {"message": "said so",   "code": 7}}'
    provider.answer = reply(said, status, retry_after="7")
    before = stored(reef)
    answer = ask(reef)
    assert (answer.status_code, answer.content, answer.headers["retry-after"]) == (status, said, "7")
    assert stored(reef) == before and "x-reef-agent-record-id" not in answer.headers


FAULTS = {
    "not JSON": (reply(b'{"id": "x", "choices": ['), 502, "not JSON"),
    "HTML": (reply(b"<html>", content_type="text/html"), 502, "not JSON"),
    "empty": (reply(b""), 502, "not JSON"),
    "compressed": (reply(b"\x1f\x8b", content_encoding="gzip"), 502, "encoded"),
    "redirect": (reply(b"", 307, location="http://elsewhere"), 502, "redirects"),
    "not HTTP": (b"SSH-2.0-OpenSSH\r\n\r\n", 502, "not HTTP"),
    "silence": (hang, 504, "sent nothing for 0.2 s"),
    "reset": (hang_up, 502, "closed the connection"),
    "half a body": (reply(ANSWER)[:-9], 504, "sent nothing"),
    "a stream of nothing": (STREAM_HEAD, 504, "sent nothing"),
}


@pytest.mark.parametrize(
    ("route", "name"), [(ROUTES[0], name) for name in FAULTS] + [(ROUTES[3], name) for name in ("not JSON", "silence")]
)
def test_what_is_no_answer_is_an_error_in_the_callers_shape(reef, provider, name, route):
    provider.answer, status, complaint = FAULTS[name]
    before = stored(reef)
    with impatient(reef) if status == 504 else nullcontext():
        answer = ask(reef, route)
    assert answer.status_code == status and complaint in message(answer)
    assert (answer.json().get("type") == "error") == (route == "/v1/messages")
    assert stored(reef) == before
    provider.answer = reply({})
    assert ask(reef).status_code == 200  # nothing of it is left in the pool


def test_nothing_is_sent_twice(reef, provider):
    provider.answer = reply({})
    ask(reef)  # a kept connection, on which a close looks like one that came too early
    provider.answer = hang_up
    before = len(provider.bodies)
    assert ask(reef).status_code == 502 and len(provider.bodies) == before + 1


@pytest.mark.parametrize(
    ("content", "status"), [(b"", 400), (b"nope", 400), (b"[1]", 400), (b'{"a":', 400), (b"[" * 100_000, 413)]
)
def test_a_body_that_is_no_json_object_is_not_sent(reef, provider, content, status):
    before = len(provider.bodies)
    answer = ask(reef, content=content)
    assert answer.status_code == status and len(provider.bodies) == before


def test_a_repeated_request_with_its_id_gets_the_stored_bytes(reef, provider):
    provider.answer = streamed(piece("a"), piece(finish="stop"), DONE)
    first = ask(reef, x_reef_record_id="again-1")
    provider.answer = reply({"other": 1})
    second = ask(reef, x_reef_record_id="again-1")
    assert first.content == second.content and second.headers["content-type"].startswith("text/event-stream")
    assert ask(reef, content=b'{"model":"other"}', x_reef_record_id="again-1").status_code == 409


def test_the_key_is_nowhere(reef, provider, tmp_path, caplog):
    provider.answer = reply(b"<html>")
    ask(reef)
    flags = {"inference.upstream-url": "http://127.0.0.1:1", "inference.upstream-api-key": KEY}
    assert KEY not in resolve(environ={}, flags=flags).to_yaml()
    database = Path(reef.deployment.config.reef.data_dir)
    assert not any(KEY.encode() in path.read_bytes() for path in database.rglob("*") if path.is_file())
    assert KEY not in reef.http.get("/reef/status").text + caplog.text
    with pytest.raises(ConfigError) as refusal:
        resolve(environ={}, flags={**flags, "inference.upstream-api-key": f"{KEY} x"})
    assert KEY not in str(refusal.value)


# ---------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"inference.upstream-url": "localhost:1"}, "upstream-url must be http"),
        ({"inference.upstream-url": "http://u:secret@h"}, "no user, query"),
        ({"inference.upstream-url": "http://h?k=1"}, "no user, query"),
        ({"inference.upstream-url": "http://h:99999"}, "upstream-url: Port out of range"),
        ({"inference.upstream-url": "http://h\r\nx:1"}, "printable ASCII"),
        ({"inference.upstream-url": "http://h", "training.backend": "torch"}, "training.backend must be none"),
        ({"inference.upstream-url": "http://h", "inference.model-path": "m"}, "needs inference.backend local, sglang"),
        ({"inference.upstream-url": "http://h", "inference.backend": "local"}, "needs inference.backend provider"),
        ({"inference.backend": "provider"}, "inference.upstream-url is required"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(flags, complaint):
    with pytest.raises(ConfigError, match=complaint) as refusal:
        resolve(environ={}, flags=flags)
    assert "secret" not in str(refusal.value)


def test_nothing_can_be_trained_or_released(reef, provider):
    provider.answer = reply({})
    ask(reef)
    for action in ("rollback", "update"):
        assert reef.http.post(f"/reef/scenarios/s/{action}").status_code == 409
