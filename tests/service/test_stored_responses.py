"""What else the official client asks of responses: their input, its length, a cancellation."""

from __future__ import annotations

import openai
import pytest

from tests.service.conftest import running
from tests.service.fakes import FakeDeployment
from tests.service.test_responses import TIME, WEATHER, create, post
from tests.service.test_tools import TWO_CALLS

RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
INPUT = [
    {"role": "developer", "content": "Be kind."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
    {"role": "assistant", "content": "Let me see."},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}", "id": "fc_mine"},
    RESULT,
]


def items(gateway, name, **query):
    return list(gateway.openai.responses.input_items.list(name, **query))


def test_every_kind_of_input_item_is_listed(gateway):
    name = create(gateway, input=INPUT, tools=[WEATHER]).id
    found = items(gateway, name, order="asc")
    assert [item.type for item in found] == [
        "message", "message", "reasoning", "message", "function_call", "function_call_output"
    ]  # fmt: skip
    assert [item.role for item in found if item.type == "message"] == ["developer", "user", "assistant"]
    assert [found[n].content[0].type for n in (0, 1, 3)] == ["input_text", "input_text", "output_text"]
    assert found[0].content[0].text == "Be kind." and found[2].content[0].text == "Hm"
    assert (found[4].id, found[4].call_id, found[5].output) == ("fc_mine", "c1", "sunny")
    assert len({item.id for item in found}) == 6 and all(item.status == "completed" for item in found)


def test_they_are_paged_newest_first(gateway):
    name = create(gateway, input=INPUT, tools=[WEATHER]).id
    ids = [item.id for item in items(gateway, name)]
    page = gateway.openai.responses.input_items.list(name, limit=4, include=["message.output_text.logprobs"])
    assert [item.id for item in page.data] == ids[:4] and page.has_more
    assert [item.id for item in items(gateway, name, limit=1, order="asc")] == ids[::-1]
    assert [item.id for item in items(gateway, name, after=ids[4])] == ids[5:]
    with pytest.raises(openai.BadRequestError) as caught:
        items(gateway, name, after="msg_none")
    assert caught.value.param == "after"


def test_all_that_a_response_goes_on_from_is_its_input(tokenizer, tmp_path):
    with running(FakeDeployment(tokenizer, tmp_path)) as gateway:
        gateway.engine.expect(text=TWO_CALLS)
        first = create(gateway, tools=[WEATHER, TIME], instructions="Be brief.")
        results = [{**RESULT, "call_id": call.call_id} for call in first.output[1:]]
        second = create(gateway, input=results, tools=[WEATHER, TIME], previous_response_id=first.id)
    with running(FakeDeployment(tokenizer, tmp_path)) as gateway:
        found = items(gateway, second.id, order="asc")
        assert found[0].content[0].text == "Hi" and [item.to_dict() for item in found[1:4]] == [
            item.to_dict() for item in first.output
        ]
        assert [item.output for item in found[4:]] == ["sunny", "sunny"]
        gateway.openai.responses.delete(first.id)
        assert [item.type for item in items(gateway, second.id)] == ["function_call_output"] * 2


def test_a_listed_item_may_be_named_in_place_of_being_sent(gateway):
    first = create(gateway)
    [asked] = items(gateway, first.id)
    second = create(gateway, input=[{"type": "item_reference", "id": asked.id}, *first.output])
    assert gateway.engine.seen[1].prompt_ids[: len(gateway.engine.seen[0].prompt_ids)] == (
        gateway.engine.seen[0].prompt_ids
    )
    assert [item.content[0].text for item in items(gateway, second.id)] == ["Hello there, friend.", "Hi"]
    gateway.openai.responses.delete(first.id)
    assert items(gateway, second.id)[-1].to_dict() == {"type": "item_reference", "id": asked.id}


def test_the_length_of_a_prompt(gateway):
    first = create(gateway, instructions="Be brief.", tools=[WEATHER], input="Hi")
    count = gateway.openai.responses.input_tokens.count
    found = count(model="m", input="Hi", instructions="Be brief.", tools=[WEATHER])
    assert (found.object, found.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    second = create(gateway, input="Go on", previous_response_id=first.id)
    assert count(input="Go on", previous_response_id=first.id).input_tokens == second.usage.input_tokens
    assert len(gateway.records()) == len(gateway.engine.seen) == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x", "personality": "friendly"}, "personality"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "stream": True}, "stream"),
    ],
)
def test_a_bad_field_of_a_count_is_named(gateway, body, field):
    answer = gateway.http.post("/v1/responses/input_tokens", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_no_response_is_made_in_the_background(gateway):
    response = create(gateway)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        gateway.openai.responses.cancel(response.id)
    for call in (gateway.openai.responses.cancel, gateway.openai.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call("resp_unknown")
    assert post(gateway, background=True).json()["error"]["param"] == "background"
    assert gateway.openai.responses.retrieve(response.id).status == "completed"


def test_a_stored_response_is_not_streamed_again(gateway):
    response = create(gateway)
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.openai.responses.retrieve(response.id, stream=True)
    assert caught.value.param == "stream"
    for query in ({"stream": "false"}, {"include_obfuscation": "true"}, {"include[]": "reasoning.encrypted_content"}):
        assert gateway.http.get(f"/v1/responses/{response.id}", params=query).json() == response.to_dict()
