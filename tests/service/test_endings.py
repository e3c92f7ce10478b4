"""Answers that do not end well: each is recorded as what it was, and none trains."""

from __future__ import annotations

import asyncio
import socket
import threading

import httpx
import openai
import pytest

from reef.errors import InvalidRequest, Unavailable
from tests.service.conftest import body, events

LONG = "word " * 300


def leave_after(gateway, fragment: bytes | None, headers: dict[str, str] | None = None, **changes) -> bytes:
    """Send a request on a bare socket, read until `fragment` (None: nothing, until the engine has it), then close."""
    content = httpx.Request("POST", "http://x/", json=body(**changes)).content
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        sent = {"host": "x", "content-length": str(len(content)), **(headers or {})}
        lines = ["POST /v1/chat/completions HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items()), "", ""]
        connection.sendall("\r\n".join(lines).encode() + content)
        seen = b""
        while fragment is not None and fragment not in seen:
            seen += connection.recv(65536)
        while fragment is None and not gateway.engine.running:
            threading.Event().wait(0.005)
        return seen


def wait_until_idle(engine, *, started: bool = False) -> None:
    """With `started`, only after it generated something."""
    for _ in range(5000):
        if engine.running == 0 and (engine.seen or not started):
            return
        threading.Event().wait(0.02)
    raise AssertionError("the engine still generates")


def test_a_client_that_leaves_a_stream_aborts_the_engine_and_is_recorded(gateway):
    gateway.engine.expect(text=LONG, gate=threading.Event())
    seen = leave_after(gateway, b"word", stream=True)
    record = gateway.wait_for_records(1)[0]
    wait_until_idle(gateway.engine)
    generation = record["generations"][0]
    assert generation["ending"] == "client_left"
    assert 0 < len(generation["output_ids"]) <= 3 and len(gateway.engine.aborted) == 1
    assert record["response"].startswith("data: ") and "[DONE]" not in record["response"]
    assert record["agent_record_id"].encode() in seen


def test_a_client_that_leaves_without_a_stream_is_noticed_too(gateway):
    gateway.engine.expect(text=LONG, gate=threading.Event())
    leave_after(gateway, None)
    record = gateway.wait_for_records(1)[0]
    wait_until_idle(gateway.engine)
    assert record["generations"][0]["ending"] == "client_left"
    assert (record["status"], record["response"]) == (499, "")


def test_leaving_before_the_first_token_is_recorded(gateway):
    gateway.engine.expect(delay=600)
    leave_after(gateway, None, stream=True)
    assert gateway.wait_for_records(1)[0]["generations"][0]["ending"] == "client_left"
    wait_until_idle(gateway.engine)


def test_an_engine_that_fails_in_a_stream_ends_it_in_an_error_event(gateway):
    gateway.engine.expect(cut_after=3)
    response = gateway.chat(stream=True)
    last = events(response.text)[-1]
    assert last["error"]["type"] == "server_error" and "scripted failure" in last["error"]["message"]
    assert "[DONE]" not in response.text
    record = gateway.records()[0]
    assert record["generations"][0]["ending"] == "engine_cut"
    assert record["response"].encode() == response.content


def test_the_client_library_raises_when_a_stream_is_cut(gateway):
    gateway.engine.expect(cut_after=3)
    stream = gateway.openai.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match="scripted failure"):
        list(stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [{"cut_after": 0}, {"refuse": Unavailable("no engine", retry_after=2.5)}])
def test_an_engine_that_fails_before_the_first_token_is_a_503_and_no_record(gateway, fault, stream):
    gateway.engine.expect(**fault)
    response = gateway.chat(stream=stream)
    assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "server_error"
    assert gateway.scenarios() == [] and gateway.records() == []


def test_what_the_engine_cannot_honour_is_a_400_and_creates_nothing(gateway):
    gateway.engine.expect(refuse=InvalidRequest("no penalties here", "presence_penalty"))
    response = gateway.chat(presence_penalty=1)
    assert response.status_code == 400 and response.json()["error"]["param"] == "presence_penalty"
    assert gateway.scenarios() == []


def test_an_engine_that_fails_without_a_stream_leaves_the_client_s_id_free(gateway):
    headers = {"x-reef-record-id": "mine"}
    gateway.engine.expect(cut_after=3)
    first = gateway.chat(headers=headers)
    assert first.status_code == 503 and first.headers["retry-after"]
    record = gateway.records()[0]
    assert record["generations"][0]["ending"] == "engine_cut"
    assert record["agent_record_id"] == first.headers["x-reef-agent-record-id"] != "mine"
    gateway.engine.expect()
    second = gateway.chat(headers=headers)
    assert second.status_code == 200 and second.headers["x-reef-agent-record-id"] == "mine"


def test_a_stream_that_was_cut_is_not_replayed_as_an_answer(gateway):
    headers = {"x-reef-record-id": "mine"}
    gateway.engine.expect(cut_after=3)
    gateway.chat(headers=headers, stream=True)
    gateway.engine.expect()
    response = gateway.chat(headers=headers, stream=True)
    assert response.status_code == 409 and "cut short" in response.json()["error"]["message"]


def test_a_bug_in_an_engine_client_ends_the_stream_and_is_recorded(gateway):
    gateway.engine.expect(die_after=3)
    assert "error" in events(gateway.chat(stream=True).text)[-1]
    assert gateway.records()[0]["generations"][0]["ending"] == "engine_cut"


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk_means_no_receipt(gateway, stream):
    gateway.chat()
    gateway.deployment.storage.full = True
    response = gateway.chat(stream=stream)
    if stream:
        assert "disk is full" in events(response.text)[-1]["error"]["message"]
        assert '"reef"' not in response.text and "[DONE]" not in response.text
    else:
        assert response.status_code == 503 and "x-reef-agent-record-id" not in response.headers
    assert gateway.http.get("/healthz").status_code == 503
    gateway.deployment.storage.full = False
    assert len(gateway.records()) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_shutdown_in_mid_generation_is_recorded(serve, deployment, run, stream):
    deployment.engine.expect(text=LONG, gate=threading.Event())
    answers = []
    with serve(shutdown_grace=0.2) as gateway:
        asking = threading.Thread(target=lambda: answers.append(gateway.chat(stream=stream)))
        asking.start()
        while not deployment.engine.at_gate:
            threading.Event().wait(0.01)
        gateway.server.should_exit = True
        asking.join(60)
        gateway.thread.join(60)
        assert not gateway.thread.is_alive()
    run(deployment.storage.open())
    record = run(deployment.storage.page("default"))[0]
    run(deployment.storage.close())
    assert record.generations[0].ending == "engine_cut"
    assert record.response == answers[0].content
    assert "shutting down" in answers[0].text
    assert answers[0].status_code == (200 if stream else 503)


def test_shutdown_does_not_wait_for_a_client_that_does_not_read(serve, deployment, run):
    deployment.engine.context = 100_000
    deployment.engine.expect(text="word " * 40_000)
    with serve(shutdown_grace=0.1) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        content = httpx.Request("POST", "http://x/", json=body(stream=True)).content
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            wait_until_idle(deployment.engine, started=True)
            gateway.server.should_exit = True
            gateway.thread.join(60)
            assert not gateway.thread.is_alive()
    run(deployment.storage.open())
    record = run(deployment.storage.page("default"))[0]
    run(deployment.storage.close())
    assert record.response.startswith(b"data: ") and b"[DONE]" not in record.response


def test_shutdown_lets_short_answers_finish(serve, deployment):
    gate, answers = threading.Event(), []
    deployment.engine.expect(gate=gate)
    with serve(shutdown_grace=60) as gateway:
        asking = threading.Thread(target=lambda: answers.append(gateway.chat()))
        asking.start()
        while not deployment.engine.at_gate:
            threading.Event().wait(0.01)
        gateway.server.should_exit = True
        while not gateway.server.gateway._closing:
            threading.Event().wait(0.01)
        gate.set()
        asking.join(60)
    assert answers[0].status_code == 200


def test_many_clients_leave_and_none_is_lost(gateway, run):
    gateway.engine.expect(text=LONG, gate=threading.Event())

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        seen = b""
        async with client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as response:
            async for part in response.aiter_bytes():
                if (seen := seen + part).count(b"data: ") >= number:
                    return

    async def crowd() -> None:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=100) as client:
            await asyncio.gather(*(leave(client, 1 + number % 3) for number in range(20)))

    run(crowd())
    records = gateway.wait_for_records(20)
    wait_until_idle(gateway.engine)
    assert {record["generations"][0]["ending"] for record in records} == {"client_left"}
