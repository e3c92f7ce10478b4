"""Bad input is a 4xx that names the field, in OpenAI's shape, and leaves nothing behind."""

from __future__ import annotations

import json
import socket

import httpx
import openai
import pytest

from tests.conftest import examples
from tests.service.conftest import body

MESSAGES = b'"model":"m","messages":[{"role":"user","content":"x"}]'


FUNCTION = {"type": "function", "function": {"name": "f"}}


def user(*parts: dict) -> dict:
    return {"role": "user", "content": list(parts)}


def refused(gateway, response: httpx.Response, field: str | None, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == field
    assert gateway.scenarios() == [] and gateway.engine.seen == []
    return error


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [user({"type": "image_url", "image_url": {}})]}, "messages[0].content[0]"),
        ({"messages": [user({"type": "input_audio", "input_audio": {}})]}, "messages[0].content[0]"),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 1_000_000}, "max_tokens"),
        ({"max_completion_tokens": 1_000_000}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 20}, "stop"),
        ({"stop": 5}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_uses": True}}, "stream_options.include_uses"),
        ({"top_k": "many"}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"tools": [{**FUNCTION, "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always", "tools": [FUNCTION]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [FUNCTION]}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "g"}}, "tools": [FUNCTION]}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"functions": [{"name": "f"}], "tools": [FUNCTION]}, "functions"),
        ({"functions": [{"name": "f"}], "tool_choice": "auto"}, "functions"),
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions"),
        ({"functions": [{"name": "f g"}]}, "functions[0].name"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"function_call": {"name": "g"}}, "function_call"),
        ({"function_call": "required"}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"tempereture": 1}, "tempereture"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(gateway, changes, field):
    error = refused(gateway, gateway.chat(**changes), field)
    assert field.rsplit(".", 1)[-1].split("[")[0] in error["message"]


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": None},
        {"tools": []},
        {"tool_choice": "none"},
        {"functions": [], "function_call": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"stop": None, "seed": None, "n": None, "stream": None, "temperature": None, "logit_bias": None},
        {"top_p": 0},
        {"top_k": -1},
    ],
)
def test_what_says_nothing_is_accepted(gateway, changes):
    assert gateway.chat(**changes).status_code == 200


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"", None),
        (b"null", None),
        (b"[]", None),
        (b"{", None),
        (b"{" + MESSAGES + b"} x", None),
        (b"\xef\xbb\xbf{" + MESSAGES + b"}", None),
        (b"{" + MESSAGES + b',"temperature":NaN}', None),
        (b"{" + MESSAGES + b',"temperature":1e999}', "temperature"),
        (b"{" + MESSAGES + b',"seed":' + b"9" * 5000 + b"}", "seed"),
        (b"{" + MESSAGES + b',"user":"\xff\xfe"}', None),
        (b"{" + MESSAGES + b',"user":"\\ud800"}', None),
    ],
)
def test_bytes_that_are_not_the_json_we_want(gateway, content, field):
    refused(gateway, gateway.http.post("/v1/chat/completions", content=content), field)


@pytest.mark.parametrize(
    "content",
    [
        b"{" + MESSAGES + b',"metadata":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        b"[" * 1_000_000,
        b"{" + MESSAGES + b',"tools":' + b'{"a":' * 50_000,
    ],
)
def test_what_is_nested_too_deeply_to_be_read_is_over_the_limit(gateway, content):
    refused(gateway, gateway.http.post("/v1/chat/completions", content=content), None, 413)


def test_any_bytes_at_all_are_answered_below_500(gateway):
    from hypothesis import given, settings
    from hypothesis import strategies as st

    scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    anything = st.recursive(
        scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
    )
    names = st.sampled_from(["model", "messages", "temperature", "stop", "n", "seed", "tools", "stream", "logit_bias"])
    bodies = st.one_of(
        st.binary(max_size=200),
        st.dictionaries(names, anything).map(lambda value: json.dumps(value).encode()),
        st.dictionaries(names, anything).map(lambda value: json.dumps({**body(), **value}).encode()),
    )

    @given(bodies)
    @settings(max_examples=examples(60))
    def check(content):
        response = gateway.http.post("/v1/chat/completions", content=content)
        assert response.status_code in (200, 400)
        if response.status_code == 400:
            assert response.json()["error"]["type"] == "invalid_request_error"

    check()


@pytest.mark.parametrize("name", ["", "a b", "é", "../x", "..", "a/b", "x" * 129, "a\tb"])
@pytest.mark.parametrize("header", ["x-reef-scenario", "x-reef-record-id"])
def test_a_bad_name_in_a_header_is_refused(gateway, header, name):
    response = gateway.http.post("/v1/chat/completions", json=body(), headers={header: name.encode()})
    refused(gateway, response, header)


def test_bad_tags_are_refused(gateway):
    refused(gateway, gateway.chat(headers={"x-reef-tag-": "x"}), "x-reef-tag-")
    refused(gateway, gateway.chat(headers={"x-reef-tag-a": "x" * 2000}), "x-reef-tag-a")
    refused(gateway, gateway.chat(headers={f"x-reef-tag-{number}": "x" for number in range(40)}), "x-reef-tag-*")


def test_a_prompt_longer_than_the_context_is_refused(gateway):
    gateway.engine.context = 16
    refused(gateway, gateway.chat(), "messages")


def test_the_client_library_sees_a_bad_request(gateway):
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.openai.chat.completions.create(model="m", messages=[], temperature=1)
    assert caught.value.param == "messages"


# ------------------------------------------------------------------ size


def test_a_declared_body_over_the_limit_is_refused_unread(serve):
    with serve(max_body_bytes=2000) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 70000000\r\n\r\n")
            answer = connection.recv(65536)
        assert b"413" in answer.split(b"\r\n")[0] and b"request_too_large" in answer
        assert gateway.scenarios() == []


def test_a_chunked_body_is_read_no_further_than_the_limit(serve):
    with serve(max_body_bytes=2000) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(3):
                connection.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
            answer = connection.recv(65536)
        assert b"413" in answer.split(b"\r\n")[0]


def test_the_client_library_sees_that_the_body_is_too_large(serve):
    with serve(max_body_bytes=2000) as gateway, pytest.raises(openai.APIStatusError) as caught:
        gateway.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 30_000}])
    assert caught.value.status_code == 413


def test_a_body_at_the_limit_is_read(serve):
    content = json.dumps(body()).encode()
    content += b" " * (2000 - len(content))
    with serve(max_body_bytes=2000) as gateway:
        assert gateway.http.post("/v1/chat/completions", content=content).status_code == 200


# ------------------------------------------------------------------ routes


def test_unknown_routes_and_methods_have_the_shape_too(gateway):
    missing, wrong = gateway.http.get("/v1/nothing"), gateway.http.get("/v1/completions")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "error" in wrong.json()
