"""Structured output and forced tools end to end: whatever a random model would say, what comes out has the form."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import openai
import pytest

from tests.conftest import needs
from tests.service.conftest import Running, serving
from tests.service.test_messages import client

needs("llguidance")

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["red", "green"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
PAINT = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}}
ERASE = {"type": "function", "function": {"name": "erase", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def real(tiny_model, tmp_path_factory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("grammar"), tiny_model, **{"inference.dtype": "float32"}) as found:
        yield found


def create(real, **changes):
    return real.openai.chat.completions.create(
        **{"model": "m", "messages": HELLO, "max_tokens": 200, "seed": 1, **changes}
    )


def test_a_schema_is_kept_to(real):
    answer = create(real, response_format=FORMAT)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_gets_arguments_of_its_schema(real, stream):
    choice = {"type": "function", "function": {"name": "paint"}}
    answer = create(real, tools=[PAINT, ERASE], tool_choice=choice, stream=stream)
    if stream:
        calls = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
        name, arguments = calls[0].function.name, "".join(call.function.arguments for call in calls)
    else:
        (call,) = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert name == "paint"
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_a_required_tool_is_one_of_those_given(real):
    for seed in range(3):
        choice = create(real, tools=[PAINT, ERASE], tool_choice="required", seed=seed).choices[0]
        (call,) = choice.message.tool_calls
        assert call.function.name in ("paint", "erase") and choice.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_responses_and_messages_too(real):
    tool = {"type": "function", "name": "paint", "parameters": SCHEMA}
    response = real.openai.responses.create(
        model="m", input="Hello", tools=[tool], tool_choice="required", max_output_tokens=200, temperature=0
    )
    jsonschema.validate(json.loads(response.output[0].arguments), SCHEMA)
    message = client(real).messages.create(
        model="m", max_tokens=200, messages=HELLO, tools=[{"name": "paint", "input_schema": SCHEMA}],
        tool_choice={"type": "any"}, extra_body={"temperature": 0},
    )  # fmt: skip
    jsonschema.validate(message.content[0].input, SCHEMA)


def test_a_schema_that_no_output_can_match_is_the_client_s_fault(real):
    impossible = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        create(real, response_format=impossible)
    assert caught.value.param == "response_format"


def test_a_forced_call_goes_on_from_its_tokens(real):
    tools = {"tools": [PAINT], "tool_choice": "required", "extra_headers": {"x-reef-scenario": "forced"}}
    message = create(real, **tools).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
    create(real, **{**tools, "tool_choice": "auto"}, messages=[*HELLO, message.model_dump(exclude_none=True), result])
    first, second = real.records("forced")
    whole = first["generations"][0]["prompt_ids"] + first["generations"][0]["output_ids"]
    assert (
        second["generations"][0]["prompt_ids"][: len(whole)] == whole
        and second["parent_id"] == first["agent_record_id"]
    )
