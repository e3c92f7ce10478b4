"""POST /v1/responses with the official client."""

from __future__ import annotations

import json
from itertools import pairwise

import openai
import pytest

from reef.service.config import Permissions
from tests.inference.chat.templates import THINKING, with_template
from tests.service.conftest import running
from tests.service.fakes import FakeDeployment
from tests.service.test_messages import events
from tests.service.test_tools import SCHEMA, THOUGHT, TWO_CALLS, prompt_of

WEATHER = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
TIME = {"type": "function", "name": "get_time"}


@pytest.fixture
def thinking(tokenizer, tmp_path):
    with running(FakeDeployment(with_template(tokenizer, THINKING), tmp_path)) as found:
        yield found


def create(gateway, **changes):
    return gateway.openai.responses.create(**{"model": "m", "input": "Hi", **changes})


def post(gateway, **changes):
    return gateway.http.post("/v1/responses", json={"model": "m", "input": "Hi", **changes})


def ids_of(record) -> list[int]:
    return record["generations"][0]["prompt_ids"] + record["generations"][0]["output_ids"]


def test_an_answer_with_usage_and_receipt(gateway):
    raw = gateway.openai.responses.with_raw_response.create(model="m", input="Hi", metadata={"a": "b"}, user="u")
    response = raw.parse()
    assert (response.output_text, response.status, response.object) == ("Hello there, friend.", "completed", "response")
    assert (response.model, response.metadata, response.instructions) == ("smollm2", {"a": "b"}, None)
    assert response.usage.input_tokens == len(gateway.engine.seen[0].prompt_ids) and response.usage.output_tokens == 6
    assert response.usage.input_tokens_details.cached_tokens == 3
    receipt = raw.headers["x-reef-agent-record-id"]
    assert receipt == response.model_extra["reef"]["agent_record_id"] and response.id == f"resp_{receipt}"


def test_every_kind_of_item_reaches_the_template(gateway):
    create(
        gateway,
        instructions="Be brief.",
        tools=[WEATHER],
        input=[
            {"role": "developer", "content": "Be kind."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Bonn"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],
    )  # fmt: skip
    for part in (
        "system\nBe brief.\n\n# Tools",
        "system\nBe kind.",
        "user\nWeather?",
        'assistant\nLet me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call><',
        "<tool_response>\nsunny",
    ):
        assert part in prompt_of(gateway)


def test_sampling_parameters_reach_the_engine(gateway):
    create(gateway, max_output_tokens=3, temperature=0.5, top_p=0.25)
    sampling = gateway.engine.seen[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (3, 0.5, 0.25)


def test_a_limit_makes_it_incomplete(gateway):
    response = create(gateway, max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert events(post(gateway, max_output_tokens=2, stream=True).text)[-1]["type"] == "response.incomplete"


def test_function_calls(gateway):
    gateway.engine.expect(text=TWO_CALLS)
    response = create(gateway, tools=[WEATHER, TIME])
    message, *calls = response.output
    assert message.content[0].text == "Let me look."
    assert [(call.type, call.name, call.arguments) for call in calls] == [
        ("function_call", "get_weather", '{"city": "Paris"}'),
        ("function_call", "get_time", "{}"),
    ]
    assert len({call.call_id for call in calls}) == len({item.id for item in calls}) == 2
    assert [tool.name for tool in response.tools] == ["get_weather", "get_time"] and response.tool_choice == "auto"


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_stream_helper_assembles_the_same_answer(gateway, chunk):
    gateway.engine.expect(text=TWO_CALLS, chunk=chunk)
    whole = create(gateway, tools=[WEATHER, TIME])
    with gateway.openai.responses.stream(model="m", input="Hi", tools=[WEATHER, TIME]) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response()
    shown = lambda response: [  # noqa: E731
        (item.type, getattr(item, "name", None), getattr(item, "arguments", None)) for item in response.output
    ]
    assert shown(streamed) == shown(whole) and streamed.output_text == whole.output_text


def test_the_event_sequence(thinking):
    thinking.engine.expect(text=THOUGHT.replace("Yes.", TWO_CALLS), chunk=2)
    response = post(thinking, stream=True, tools=[WEATHER, TIME])
    found = events(response.text)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    names = [event["type"].removeprefix("response.") for event in found]
    assert names[:2] == ["created", "in_progress"] and names[-1] == "completed"
    repeated = [name for at, name in enumerate(names) if at == 0 or name != names[at - 1]]
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    expected = ["created", "in_progress"]
    for middle in (
        [name.format("reasoning_text") for name in part],
        [name.format("output_text") for name in part],
        ["function_call_arguments.delta", "function_call_arguments.done"],
        ["function_call_arguments.delta", "function_call_arguments.done"],
    ):
        expected += ["output_item.added", *middle, "output_item.done"]
    assert repeated == [*expected, "completed"]
    for number, kind in enumerate(("reasoning", "message", "function_call", "function_call")):
        of_item = [event for event in found if event.get("output_index") == number]
        assert of_item[0]["item"]["type"] == of_item[-1]["item"]["type"] == kind
        assert (of_item[0]["item"]["status"], of_item[-1]["item"]["status"]) == ("in_progress", "completed")
        assert {event["item_id"] for event in of_item if "item_id" in event} == {of_item[0]["item"]["id"]}
    final = found[-1]["response"]
    assert final["output"] == [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert final["reef"]["agent_record_id"] == response.headers["x-reef-agent-record-id"]
    assert thinking.records()[0]["response"].encode() == response.content


def test_logprobs_when_included(gateway):
    response = create(gateway, include=["message.output_text.logprobs"], top_logprobs=2)
    tokens = response.output[0].content[0].logprobs
    assert "".join(token.token for token in tokens) == "Hello there, friend." and len(tokens[0].top_logprobs) == 2


def test_structured_output(gateway):
    from pydantic import BaseModel

    class Place(BaseModel):
        city: str

    gateway.engine.expect(text='{"city": "Bern"}')
    assert gateway.openai.responses.parse(model="m", input="Hi", text_format=Place).output_parsed.city == "Bern"
    assert gateway.engine.seen[0].sampling.grammar.kind == "json_schema"
    create(gateway, text={"format": {"type": "json_object"}})
    assert gateway.engine.seen[1].sampling.grammar.kind == "json_object"


def test_a_function_is_forced(gateway):
    gateway.engine.expect(text='{"city": "Oslo"}')
    response = create(gateway, tools=[WEATHER, TIME], tool_choice={"type": "function", "name": "get_weather"})
    assert response.output[0].arguments == '{"city": "Oslo"}'
    assert response.tool_choice.name == "get_weather"


# ------------------------------------------------------------------ going on from an earlier response


@pytest.mark.parametrize("stream", [False, True])
def test_it_goes_on_from_the_recorded_tokens(gateway, stream):
    gateway.engine.expect(text='<tool_call>{"name":"get_weather","arguments":{"city":"Rome"}}</tool_call>')
    first = post(gateway, tools=[WEATHER], instructions="Be brief.", stream=stream)
    final = events(first.text)[-1]["response"] if stream else first.json()
    call = final["output"][0]
    gateway.engine.expect(text="It is sunny.")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    second = create(
        gateway, input=[result], previous_response_id=final["id"], tools=[WEATHER], instructions="Be brief."
    )
    third = create(gateway, input="Sure?", previous_response_id=second.id, tools=[WEATHER], instructions="Be brief.")
    records = gateway.records()
    for before, after in pairwise(records):
        assert ids_of(after)[: len(ids_of(before))] == ids_of(before)
        assert (after["parent_id"], after["fork_of"]) == (before["agent_record_id"], None)
    assert third.previous_response_id == second.id


def test_instructions_are_those_of_the_newest_request_only(gateway):
    first = create(gateway, instructions="Be brief.")
    create(gateway, previous_response_id=first.id, input="Go on", instructions="Be long.")
    assert "Be long." in prompt_of(gateway) and "Be brief." not in prompt_of(gateway)


def test_of_equal_answers_the_one_that_was_named_is_gone_on_with(gateway):
    letters = [gateway.deployment.chat.tokenizer.encode_now(letter)[0] for letter in "hello"]
    gateway.engine.expect(ids=[*letters, 2])
    first = create(gateway)
    gateway.engine.expect(text="hello")
    create(gateway)
    create(gateway, input="Go on", previous_response_id=first.id)
    before, _, after = gateway.records()
    assert ids_of(after)[: len(ids_of(before))] == ids_of(before)
    assert after["parent_id"] == before["agent_record_id"]


def test_what_was_not_to_be_stored_cannot_be_gone_on_with(gateway):
    hidden = create(gateway, store=False)
    assert hidden.store is False and len(gateway.records()) == 1
    with pytest.raises(openai.BadRequestError) as caught:
        create(gateway, previous_response_id=hidden.id)
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        gateway.openai.responses.retrieve(hidden.id)


def test_an_answer_that_was_cut_cannot_be_gone_on_with(gateway):
    gateway.engine.expect(cut_after=3)
    post(gateway, stream=True)
    receipt = gateway.records()[0]["agent_record_id"]
    gateway.engine.expect()
    response = post(gateway, previous_response_id=f"resp_{receipt}")
    assert response.status_code == 400 and response.json()["error"]["param"] == "previous_response_id"


def test_another_scenario_does_not_see_it(gateway):
    response = create(gateway)
    headers = {"x-reef-scenario": "other"}
    with pytest.raises(openai.BadRequestError):
        create(gateway, previous_response_id=response.id, extra_headers=headers)


@pytest.mark.parametrize("dump", [lambda item: item, lambda item: item.model_dump(), lambda item: item.to_dict()])
def test_what_came_can_be_sent_back_as_the_client_library_has_it(gateway, dump):
    gateway.engine.expect(text=TWO_CALLS)
    first = create(gateway, tools=[WEATHER, TIME])
    create(gateway, tools=[WEATHER, TIME], input=[{"role": "user", "content": "Hi"}, *map(dump, first.output)])
    before, after = gateway.records()
    assert ids_of(after)[: len(ids_of(before))] == ids_of(before)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_can_be_had_again(gateway, stream):
    first = post(gateway, stream=stream)
    final = events(first.text)[-1]["response"] if stream else first.json()
    found = gateway.openai.responses.retrieve(final["id"])
    assert found.output_text == "Hello there, friend." and json.loads(found.to_json())["usage"] == final["usage"]
    with pytest.raises(openai.NotFoundError):
        gateway.openai.responses.retrieve("resp_unknown")


def test_items_may_be_named_in_place_of_being_sent(gateway):
    gateway.engine.expect(text='Hm. <tool_call>{"name":"get_weather","arguments":{"city":"Rome"}}</tool_call>')
    first = create(gateway, tools=[WEATHER])
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sunny"}
    second = create(gateway, input=[{"role": "user", "content": "Hi"}, *named, result], tools=[WEATHER])
    create(gateway, input="Sure?", previous_response_id=second.id, tools=[WEATHER])
    for before, after in pairwise(gateway.records()):
        assert ids_of(after)[: len(ids_of(before))] == ids_of(before)
    gateway.openai.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="no stored item"):
        create(gateway, input=[{"id": first.output[0].id}])


def test_a_deleted_response_is_not_found_again_and_its_record_stays(gateway):
    first = create(gateway)
    second = create(gateway, input="Go on", previous_response_id=first.id)
    before = gateway.records()
    with pytest.raises(openai.NotFoundError):
        gateway.openai.responses.delete("resp_unknown")
    with pytest.raises(openai.NotFoundError):
        gateway.openai.responses.delete(first.id, extra_headers={"x-reef-scenario": "other"})
    gateway.openai.responses.delete(first.id)
    for gone in (gateway.openai.responses.retrieve, gateway.openai.responses.delete):
        with pytest.raises(openai.NotFoundError):
            gone(first.id)
    for earlier in (first, second):
        with pytest.raises(openai.BadRequestError) as caught:
            create(gateway, input="Go on", previous_response_id=earlier.id)
        assert caught.value.param == "previous_response_id"
    assert gateway.openai.responses.retrieve(second.id).id == second.id
    *kept, deletion = gateway.records()
    assert kept == before and deletion["route"] == "DELETE /v1/responses"
    assert deletion["parent_id"] == first.id.removeprefix("resp_") and deletion["generations"] == []


def test_a_deletion_is_recorded_or_refused(serve):
    with serve(permissions=Permissions(record=False)) as gateway:
        assert gateway.http.delete("/v1/responses/resp_x").status_code == 403


def test_an_engine_that_fails_in_a_stream_ends_it_in_an_error_event(gateway):
    gateway.engine.expect(cut_after=3)
    found = events(post(gateway, stream=True).text)
    assert found[-1]["type"] == "error" and "scripted failure" in found[-1]["message"]
    with pytest.raises(openai.APIError, match="scripted failure"):
        list(create(gateway, stream=True))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].type"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "f"}]}, "input[0].output"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f g"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}, "tools": [TIME]}, "tool_choice.server_label"),
        ({"tool_choice": {"type": "web_search"}, "tools": [TIME]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"previous_response_id": "other"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(gateway, changes, field):
    response = post(gateway, **changes)
    assert response.status_code == 400 and response.json()["error"]["param"] == field, response.text
    assert gateway.engine.seen == [] and gateway.scenarios() == []
