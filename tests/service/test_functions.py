"""The deprecated `functions` and `function_call` of chat completions, with the official client."""

from __future__ import annotations

import json

import openai
import pytest

from tests.service.test_tools import BROKEN, HELLO, SCHEMA, TWO_CALLS, prompt_of

WEATHER = {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
TIME = {"name": "get_time"}


def create(gateway, **changes):
    given = {"model": "m", "messages": HELLO, "functions": [WEATHER, TIME], **changes}
    return gateway.openai.chat.completions.create(**given)


def test_one_function_at_most_is_called(gateway):
    gateway.engine.expect(text=TWO_CALLS)
    choice = create(gateway).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("function_call", "Let me look.")
    assert choice.message.function_call.model_dump() == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert choice.message.tool_calls is None and '"name": "get_time"' in prompt_of(gateway)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_streamed_call_is_the_same_as_a_whole_one(gateway, chunk):
    gateway.engine.expect(text=TWO_CALLS, chunk=chunk)
    whole = create(gateway).choices[0]
    with gateway.openai.chat.completions.stream(model="m", messages=HELLO, functions=[WEATHER, TIME]) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.function_call == whole.message.function_call
    assert (streamed.message.content, streamed.finish_reason) == (whole.message.content, "function_call")
    calls = [call for one in chunks if (call := one.choices[0].delta.function_call)]
    assert (calls[0].name, calls[0].arguments) == ("get_weather", "") and all(call.name is None for call in calls[1:])
    assert all(one.choices[0].delta.tool_calls is None for one in chunks)


def test_a_named_function_is_forced(gateway):
    gateway.engine.expect(text='{"city": "Oslo"}')
    message = create(gateway, function_call={"name": "get_weather"}).choices[0].message
    assert (message.function_call.arguments, message.content) == ('{"city": "Oslo"}', None)
    assert prompt_of(gateway).endswith('<tool_call>\n{"name": "get_weather", "arguments": ')
    assert json.loads(gateway.engine.seen[0].sampling.grammar.value) == SCHEMA


def test_none_neither_shows_nor_looks_for_functions(gateway):
    gateway.engine.expect(text=TWO_CALLS)
    message = create(gateway, function_call="none").choices[0].message
    assert message.function_call is None and message.content == TWO_CALLS and "get_weather" not in prompt_of(gateway)


def test_the_result_goes_back_and_the_conversation_keeps_its_tokens(gateway):
    gateway.engine.expect(text=BROKEN.replace("oops", '"Rome"'))
    message = create(gateway).choices[0].message
    gateway.engine.expect(text="It is sunny.")
    result = {"role": "function", "name": "get_weather", "content": "sunny"}
    answer = create(gateway, messages=[*HELLO, message.model_dump(exclude_none=True), result])
    assert answer.choices[0].message.content == "It is sunny." and answer.choices[0].finish_reason == "stop"
    assert "<tool_response>\nsunny\n</tool_response>" in prompt_of(gateway)
    first, second = gateway.records()
    whole = first["generations"][0]["prompt_ids"] + first["generations"][0]["output_ids"]
    assert second["generations"][0]["prompt_ids"][: len(whole)] == whole
    assert (second["parent_id"], second["fork_of"]) == (first["agent_record_id"], None)


def test_a_history_of_functions_is_one_of_tools(gateway):
    call = {"name": "get_weather", "arguments": '{"city": "Bonn"}'}
    result = {"content": "sunny"}
    functions = [{"role": "assistant", "content": None, "function_call": call},
                 {"role": "function", "name": "get_weather", **result}]  # fmt: skip
    tools = [{"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
             {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", **result}]  # fmt: skip
    for turns in (functions, tools):
        assert gateway.chat(messages=[*HELLO, *turns]).status_code == 200
    assert gateway.engine.seen[0].prompt_ids == gateway.engine.seen[1].prompt_ids
    assert gateway.chat(messages=[*HELLO, functions[0], {**functions[1], "content": None}]).status_code == 200


def test_a_turn_has_calls_of_one_kind(gateway):
    call = {"name": "f", "arguments": "{}"}
    turn = {
        "role": "assistant",
        "function_call": call,
        "tool_calls": [{"id": "a", "type": "function", "function": call}],
    }
    with pytest.raises(openai.BadRequestError) as caught:
        create(gateway, messages=[*HELLO, turn])
    assert caught.value.param == "messages[1].function_call"
