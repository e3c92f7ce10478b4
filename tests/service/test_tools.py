"""Tools, structured output and reasoning in chat completions, with the official client."""

from __future__ import annotations

import json

import pytest

from tests.inference.chat.templates import EFFORT, THINKING, with_template
from tests.service.conftest import events, running
from tests.service.fakes import FakeDeployment

HELLO = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "get_time"}}
TWO_CALLS = (
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
BROKEN = '<tool_call>{"name": "get_weather", "arguments": {"city": oops}}</tool_call>'


@pytest.fixture
def thinking(tokenizer, tmp_path):
    with running(FakeDeployment(with_template(tokenizer, THINKING), tmp_path)) as found:
        yield found


def create(gateway, **changes):
    return gateway.openai.chat.completions.create(
        **{"model": "m", "messages": HELLO, "tools": [WEATHER, TIME], **changes}
    )


def test_parallel_calls(gateway):
    gateway.engine.expect(text=TWO_CALLS)
    choice = create(gateway).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    calls = choice.message.tool_calls
    assert [(call.function.name, call.function.arguments, call.type) for call in calls] == [
        ("get_weather", '{"city": "Paris"}', "function"),
        ("get_time", "{}", "function"),
    ]
    assert len({call.id for call in calls}) == 2 and all(call.id.startswith("call_") for call in calls)


def test_an_answer_of_calls_only_has_no_content(gateway):
    gateway.engine.expect(text=TWO_CALLS.partition("\n")[2])
    assert create(gateway).choices[0].message.content is None


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_streamed_calls_are_the_same_as_whole_ones(gateway, chunk):
    gateway.engine.expect(text=TWO_CALLS, chunk=chunk)
    whole = create(gateway).choices[0].message
    with gateway.openai.chat.completions.stream(model="m", messages=HELLO, tools=[WEATHER, TIME]) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    shown = lambda message: [(call.function.name, call.function.arguments) for call in message.tool_calls]  # noqa: E731
    assert shown(streamed.message) == shown(whole) and streamed.message.content == whole.content
    assert streamed.finish_reason == "tool_calls" and kinds.count("tool_calls.function.arguments.done") == 2


def test_the_shape_of_streamed_calls(gateway):
    gateway.engine.expect(text=TWO_CALLS)
    response = gateway.chat(tools=[WEATHER, TIME], stream=True)
    chunks = events(response.text)[:-1]
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    heads = [delta for delta in deltas if "id" in delta]
    assert [(head["index"], head["type"], head["function"]) for head in heads] == [
        (0, "function", {"name": "get_weather", "arguments": ""}),
        (1, "function", {"name": "get_time", "arguments": ""}),
    ]
    assert all(set(delta) == {"index", "function"} for delta in deltas if "id" not in delta)
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}
    assert gateway.records()[0]["response"].encode() == response.content


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_that_are_no_json_reach_the_client(gateway, stream):
    gateway.engine.expect(text=BROKEN)
    answer = create(gateway, stream=stream)
    if stream:
        calls = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
        arguments = "".join(call.function.arguments for call in calls)
    else:
        arguments = answer.choices[0].message.tool_calls[0].function.arguments
    assert arguments == '{"city": oops}'


def test_the_result_goes_back_and_the_conversation_keeps_its_tokens(gateway):
    gateway.engine.expect(text=BROKEN.replace("oops", '"Rome"'))
    message = create(gateway).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    gateway.engine.expect(text="It is sunny.")
    answer = create(gateway, messages=[*HELLO, message.model_dump(exclude_none=True), result])
    assert answer.choices[0].message.content == "It is sunny."
    first, second = gateway.records()
    whole = first["generations"][0]["prompt_ids"] + first["generations"][0]["output_ids"]
    assert second["generations"][0]["prompt_ids"][: len(whole)] == whole
    assert (second["parent_id"], second["fork_of"]) == (first["agent_record_id"], None)


def test_an_edited_answer_is_marked_as_a_fork(gateway):
    create(gateway)
    create(gateway, messages=[*HELLO, {"role": "assistant", "content": "Edited."}, {"role": "user", "content": "?"}])
    first, second = gateway.records()
    assert (second["parent_id"], second["fork_of"]) == (None, first["agent_record_id"])


def test_choice_none_neither_shows_nor_looks_for_tools(gateway):
    gateway.engine.expect(text=TWO_CALLS)
    message = create(gateway, tool_choice="none").choices[0].message
    assert message.tool_calls is None and message.content == TWO_CALLS
    assert "get_weather" not in prompt_of(gateway)


def prompt_of(gateway) -> str:
    return gateway.deployment.chat.tokenizer._tokenizer.decode(gateway.engine.seen[-1].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_forced(gateway, stream):
    gateway.engine.expect(text='{"city": "Oslo"}')
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = create(gateway, tool_choice=choice, stream=stream)
    if stream:
        calls = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
        assert calls[0].function.name == "get_weather"
        assert "".join(call.function.arguments for call in calls) == '{"city": "Oslo"}'
    else:
        assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    assert prompt_of(gateway).endswith('<tool_call>\n{"name": "get_weather", "arguments": ')
    grammar = gateway.engine.seen[0].sampling.grammar
    assert (grammar.kind, json.loads(grammar.value)) == ("json_schema", SCHEMA)


def test_some_tool_is_required(gateway):
    gateway.engine.expect(text='{"name": "get_time", "arguments": {}}')
    choice = create(gateway, tool_choice="required").choices[0]
    assert choice.message.tool_calls[0].function.name == "get_time" and choice.finish_reason == "tool_calls"
    assert len(json.loads(gateway.engine.seen[0].sampling.grammar.value)["anyOf"]) == 2


def test_allowed_tools_are_those_that_the_model_is_told_of(gateway):
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    create(gateway, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert "get_time" in prompt_of(gateway) and "get_weather" not in prompt_of(gateway)


def test_calls_that_may_not_be_parallel_end_the_answer(gateway):
    gateway.engine.expect(text=TWO_CALLS)
    choice = create(gateway, parallel_tool_calls=False).choices[0]
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"
    generation = gateway.records()[0]["generations"][0]
    assert generation["ending"] == "stop" and generation["spans"][-1]["end"] == len(generation["output_ids"])


def test_several_choices_have_calls_of_their_own(gateway):
    gateway.engine.expect(text=TWO_CALLS)
    choices = create(gateway, n=2).choices
    ids = [call.id for choice in choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 4
    streamed: dict[int, list[str]] = {0: [], 1: []}
    for chunk in create(gateway, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += [call.id for call in choice.delta.tool_calls or () if call.id]
    assert [len(ids) for ids in streamed.values()] == [2, 2]


def test_a_call_cut_by_the_budget_is_shown_as_far_as_it_goes(gateway):
    gateway.engine.expect(text=BROKEN)
    choice = create(gateway, max_completion_tokens=24).choices[0]
    assert choice.finish_reason == "length" and '{"city": oops}'.startswith(
        choice.message.tool_calls[0].function.arguments
    )


# ------------------------------------------------------------------ structured output


def test_a_json_schema_becomes_a_grammar(gateway):
    from pydantic import BaseModel

    class Place(BaseModel):
        city: str

    gateway.engine.expect(text='{"city": "Bern"}')
    answer = gateway.openai.chat.completions.parse(model="m", messages=HELLO, response_format=Place)
    assert answer.choices[0].message.parsed.city == "Bern"
    grammar = gateway.engine.seen[0].sampling.grammar
    assert grammar.kind == "json_schema" and json.loads(grammar.value)["required"] == ["city"]


def test_a_json_object_becomes_a_grammar(gateway):
    gateway.openai.chat.completions.create(model="m", messages=HELLO, response_format={"type": "json_object"})
    assert gateway.engine.seen[0].sampling.grammar.kind == "json_object"


# ------------------------------------------------------------------ reasoning

THOUGHT = "<think>\nHm, well.\n</think>\n\nYes."


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_has_a_field_of_its_own(thinking, stream):
    thinking.engine.expect(text=THOUGHT)
    answer = thinking.openai.chat.completions.create(model="m", messages=HELLO, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in answer]
        reasoning = "".join(delta.model_extra.get("reasoning_content") or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        message = answer.choices[0].message
        reasoning, content = message.model_extra["reasoning_content"], message.content
        assert answer.usage.completion_tokens_details.reasoning_tokens > 3
    assert (reasoning, content) == ("Hm, well.", "Yes.")


def test_effort_none_switches_thinking_off(thinking):
    thinking.openai.chat.completions.create(model="m", messages=HELLO, reasoning_effort="none")
    assert prompt_of(thinking).endswith("<think>\n\n</think>\n\n")
    thinking.openai.chat.completions.create(model="m", messages=HELLO, reasoning_effort="high")
    assert prompt_of(thinking).endswith("assistant\n")


def test_effort_reaches_the_template(tokenizer, tmp_path):
    with running(FakeDeployment(with_template(tokenizer, EFFORT), tmp_path)) as gateway:
        gateway.openai.chat.completions.create(model="m", messages=HELLO, reasoning_effort="low")
        assert prompt_of(gateway).startswith("Effort: low")


def test_reasoning_may_come_back_in_the_assistant_s_turn(thinking):
    thinking.engine.expect(text=THOUGHT)
    message = thinking.openai.chat.completions.create(model="m", messages=HELLO).choices[0].message
    assert thinking.chat(messages=[*HELLO, message.model_dump(), *HELLO]).status_code == 200
    assert thinking.records()[1]["parent_id"] == thinking.records()[0]["agent_record_id"]


def test_a_schema_leaves_no_room_for_thinking(thinking):
    thinking.openai.chat.completions.create(model="m", messages=HELLO, response_format={"type": "json_object"})
    assert prompt_of(thinking).endswith("</think>\n\n")


def test_the_last_turn_of_the_assistant_is_gone_on_with(gateway):
    answer = create(gateway, messages=[*HELLO, {"role": "assistant", "content": "It is"}])
    assert answer.choices[0].message.content == "Hello there, friend." and prompt_of(gateway).endswith(
        "assistant\nIt is"
    )


def test_a_format_leaves_room_for_a_call(gateway):
    gateway.engine.expect(text=TWO_CALLS.partition("\n")[2])
    assert len(create(gateway, response_format={"type": "json_object"}).choices[0].message.tool_calls) == 2
    grammar = gateway.engine.seen[0].sampling.grammar
    assert grammar.kind == "lark" and "get_weather" in grammar.value and "get_time" in grammar.value
    create(gateway, response_format={"type": "json_object"}, tool_choice="none")
    assert gateway.engine.seen[1].sampling.grammar.kind == "json_object"
