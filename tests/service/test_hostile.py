"""Whatever a client sends to a provider-shaped route is answered below 500, and nothing is half stored."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.errors import InvalidRequest
from reef.service.routes_inference import CHAT, COMPLETIONS, RESPONSES, messages
from tests.conftest import examples
from tests.service.test_tools import SCHEMA

FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "x"}'}}
VALID = {
    CHAT: {
        "model": "m", "stream": False, "n": 1, "seed": 1, "stop": ["x"], "logit_bias": {"5": 1}, "max_tokens": 5,
        "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "text"}, "stream_options": None, "metadata": {"a": "b"},
    },
    COMPLETIONS: {"model": "m", "prompt": ["a", "b"], "n": 1, "logprobs": 1, "max_tokens": 5, "stop": "x"},
    RESPONSES: {
        "model": "m", "instructions": "i", "max_output_tokens": 5, "stream": False, "previous_response_id": None,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "id": "r"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ],
        "tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto", "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None}, "include": [],
    },
    messages.MESSAGES: {
        "model": "m", "max_tokens": 5, "stream": False, "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "t"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "h", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}, "stop_sequences": ["x"],
        "thinking": {"type": "disabled"}, "output_config": {},
    },
}  # fmt: skip
APIS = list(VALID)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "a", "role"]), inner),
    max_leaves=6,
)


def places(value, path=()):
    """Every path into a JSON value."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in children:
        yield from places(inner, (*path, key))


@st.composite
def damaged(draw, valid: dict) -> dict:
    """A valid body in which one to three values are something else."""
    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from([path for path in places(body) if path]))
        target = body
        for key in path:
            target = target[key]
        target[last] = draw(anything)
    return body


def ids(api) -> str:
    return api.route


@pytest.mark.parametrize("api", APIS, ids=ids)
def test_what_these_tests_damage_is_valid(api, gateway):
    response = gateway.http.post(api.route, json=VALID[api])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("api", APIS, ids=ids)
def test_the_parsers_raise_nothing_but_invalid_request(api):
    @given(damaged(VALID[api]))
    @settings(max_examples=examples(100))
    def check(body):
        try:
            api.parse(json.dumps(body).encode())
        except InvalidRequest as error:
            assert str(error)

    check()


@pytest.mark.parametrize("api", APIS, ids=ids)
def test_every_answer_is_below_500(api, gateway):
    @given(damaged(VALID[api]))
    @settings(max_examples=examples(40))
    def check(body):
        before = len(gateway.records(limit=1000))
        response = gateway.http.post(api.route, json=body)
        assert response.status_code in (200, 400), response.text
        assert len(gateway.records(limit=1000)) - before == (response.status_code == 200)
        if response.status_code == 400:
            assert response.json()["error"]["type"] == "invalid_request_error"

    check()


@pytest.mark.parametrize("api", APIS, ids=ids)
@pytest.mark.parametrize(
    "content",
    [
        b"", b"null", b"[]", b"{", b"\xff", b'{"model":"m","input":"\\ud800","prompt":"\\ud800","messages":"\\ud800"}',
        b'{"model":"m","max_tokens":NaN}', b"[" * 60, b'{"messages":' + b'[{"content":' * 30,
        b'{"model":"m","max_tokens":' + b"9" * 5000 + b"}", b'{"model":"m","model":' * 2,
    ],
)  # fmt: skip
def test_bytes_that_are_no_request(api, gateway, content):
    response = gateway.http.post(api.route, content=content)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    assert gateway.scenarios() == []


@pytest.mark.parametrize("api", [api for api in APIS if api is not COMPLETIONS], ids=ids)
def test_deep_json_in_free_fields_is_named(api, gateway):
    deep: dict = {}
    for _ in range(500):
        deep = {"a": deep}
    body = copy.deepcopy(VALID[api])
    tool = body["tools"][0]
    place = tool.get("function", tool)
    place["input_schema" if "input_schema" in place else "parameters"] = deep
    response = gateway.http.post(api.route, json=body)
    assert response.status_code == 413 and "tools[0]" in response.json()["error"]["message"]


def test_deep_json_in_arguments_is_no_error_of_ours(gateway):
    body = copy.deepcopy(VALID[CHAT])
    for depth in (300, 900, 5000):
        body["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"a":' * depth + "1" + "}" * depth
        assert gateway.http.post(CHAT.route, json=body).status_code in (200, 400)


@pytest.mark.parametrize("number", ["18446744073709551616", "-9223372036854775809", "1" + "0" * 400])
def test_a_number_that_no_client_could_read_back_is_refused(gateway, number):
    body = (
        '{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"hi"}],'
        '"tools":[{"name":"f","input_schema":{"type":"object","maximum":NUMBER}}]}'.replace("NUMBER", number)
    )
    answer = gateway.http.post("/v1/messages", content=body)
    assert answer.status_code == 400 and "64 bits" in answer.text
