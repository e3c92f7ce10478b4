"""What one request, and all of a client's together, may take."""

from __future__ import annotations

import json
import socket

import anthropic
import pytest

from reef.errors import RequestTooLarge
from reef.service import http
from reef.service.wire.base import check_nesting
from tests.service.conftest import Running, body

MESSAGES = [{"role": "user", "content": "Hi"}]


def connected(gateway: Running) -> socket.socket:
    host, port = gateway.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=100)


def everything(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


# ------------------------------------------------------------------ depth


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_depth_is_counted_exactly(opening):
    closing = opening.replace('"a":', "").translate(str.maketrans("[{", "]}"))[::-1]
    for times in (1, 2, 5, 30):
        text = (opening * times + '"[[[{\\"{"' + closing * times).encode()
        depth = times * len(closing)
        check_nesting(text, depth)
        with pytest.raises(RequestTooLarge):
            check_nesting(text, depth - 1)


@pytest.mark.parametrize("text", [b"[" * 9, b"]" * 9, b'"' + b"[" * 9, b'["' + b"[" * 9, b"[{]}" * 9, b"{}" * 9])
def test_what_is_no_json_is_left_to_the_parser(text):
    check_nesting(text, 8)


@pytest.mark.parametrize("depth", [65, 300, 900])
@pytest.mark.parametrize(
    ("route", "content", "field"),
    [
        ("/reef/report", {"references": ["x"], "score": 1, "metadata": {"a": {}}}, "metadata.a"),
        ("/reef/report", {"references": ["x"], "feedback": {"a": {}}}, "feedback.a"),
        ("/reef/train", {"a": {}}, "a"),
        ("/v1/chat/completions", body(metadata={"a": {}}), "metadata.a"),
        ("/v1/responses", {"model": "m", "input": [{"a": {}}]}, "input[0].a"),
        ("/v1/messages/count_tokens", {"model": "m", "messages": MESSAGES, "tools": [{"a": {}}]}, "tools[0].a"),
    ],
)
def test_nesting_over_the_limit_is_named_and_stores_nothing(gateway, route, content, field, depth):
    text = json.dumps(content).replace("{}", "[" * depth + "]" * depth)
    answer = gateway.http.post(route, content=text)
    assert answer.status_code == 413 and answer.json()["error"]["message"].startswith(field)
    assert gateway.scenarios() == []


def test_the_deepest_report_that_may_be_sent_is_stored(serve):
    with serve(max_json_depth=200) as gateway:
        receipt = gateway.chat().headers["x-reef-agent-record-id"]
        text = f'{{"references":["{receipt}"],"score":1,"metadata":{{"a":{"[" * 198}{"]" * 198}}}}}'
        assert gateway.http.post("/reef/report", content=text).status_code == 200
        assert gateway.http.post("/reef/train", content='{"a":' * 200 + "1" + "}" * 200).status_code == 200


# ------------------------------------------------------------------ messages, scenarios


def test_messages_over_the_limit_are_refused_in_the_shape_of_each_api(serve):
    with serve(max_messages=3) as gateway:
        assert gateway.chat(messages=MESSAGES * 3).status_code == 200
        answer = gateway.chat(messages=MESSAGES * 4)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
        assert answer.headers["retry-after"] == "60"
        turns = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
        assert gateway.http.post("/v1/responses", json={"model": "m", "input": turns}).status_code == 413
        client = anthropic.Anthropic(base_url=gateway.url, api_key="x", max_retries=0)
        with pytest.raises(anthropic.APIStatusError, match="at most 3 messages, got 4") as caught:
            client.messages.create(model="m", max_tokens=1, messages=turns)
        assert caught.value.status_code == 413 and caught.value.body["error"]["type"] == "request_too_large"
        counted = gateway.http.post("/v1/messages/count_tokens", json={"model": "m", "messages": turns})
        assert counted.status_code == 413


def test_a_chain_of_responses_counts_with_what_it_goes_on_from(serve):
    with serve(max_messages=3) as gateway:
        first = gateway.openai.responses.create(model="m", input="a")
        gateway.openai.responses.create(model="m", input="b", previous_response_id=first.id)
        second = {"model": "m", "input": [{"role": "user", "content": "x"}] * 2, "previous_response_id": first.id}
        assert gateway.http.post("/v1/responses", json=second).status_code == 413


def test_no_more_scenarios_than_the_limit(serve):
    with serve(max_scenarios=2) as gateway:
        assert gateway.chat(headers={"x-reef-scenario": "one"}).status_code == 200
        assert gateway.http.post("/reef/scenarios", json={"name": "two"}).status_code == 201
        before = len(gateway.engine.seen)
        for answer in (
            gateway.chat(headers={"x-reef-scenario": "three"}),
            gateway.http.post("/reef/scenarios", json={"name": "three"}),
            gateway.http.post("/reef/train", json={}, headers={"x-reef-scenario": "three"}),
        ):
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["type"] == "rate_limit_error"
        assert len(gateway.engine.seen) == before and gateway.scenarios() == ["one", "two"]
        assert gateway.chat(headers={"x-reef-scenario": "two"}).status_code == 200


# ------------------------------------------------------------------ what precedes a body, and slowness


def test_a_body_that_does_not_arrive_is_given_up(serve):
    with serve(body_timeout=0.2) as gateway, connected(gateway) as connection:
        connection.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = everything(connection)
        assert b" 408 " in answer.split(b"\r\n")[0] and b'"type":"error"' in answer
        assert gateway.scenarios() == []


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"x-%d: y\r\n" % number for number in range(1000)),
        b"".join(b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(200)),
        b"x: " + b"y" * 5_000_000 + b"\r\n",
    ],
)
def test_a_flood_of_headers_is_refused_early(gateway, head):
    with connected(gateway) as connection:
        try:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
            answer = everything(connection)
        except ConnectionError:  # it was closed in our face
            answer = b"HTTP/1.1 431"
    assert answer.startswith(b"HTTP/1.1 431")
    assert gateway.http.get("/healthz").status_code == 200


def test_a_long_url_is_refused(gateway):
    with connected(gateway) as connection:
        connection.sendall(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert everything(connection).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: "])
def test_a_head_that_does_not_end_is_given_up(gateway, monkeypatch, said):
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.2)
    with connected(gateway) as connection:
        connection.sendall(said)
        assert everything(connection).startswith(b"HTTP/1.1 408")


def test_a_large_body_before_the_next_head_is_not_taken_for_one(gateway):
    content = json.dumps(body(user="x" * 200_000)).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content
    with connected(gateway) as connection:
        connection.sendall(request * 3 + b"GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answers = everything(connection)
    assert answers.count(b"HTTP/1.1 200") == 3 and answers.count(b"HTTP/1.1 404") == 1


def test_pipelined_requests_are_answered_in_order(gateway):
    names = [f"s{number}" for number in range(10)]
    heads = [b"GET /reef/scenarios/%s HTTP/1.1\r\nhost: x\r\n\r\n" % name.encode() for name in names]
    with connected(gateway) as connection:
        connection.sendall(b"".join(heads) + b"GET /healthz HTTP/1.1\r\nconnection: close\r\n\r\n")
        answers = everything(connection)
    places = [answers.index(f"'{name}'".encode()) for name in names]
    assert places == sorted(places)
