"""After a restart: conversations and stored responses go on from what was recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reef.service import recall
from tests.service.conftest import running, serving
from tests.service.fakes import FakeDeployment
from tests.service.test_messages import client
from tests.service.test_tools import WEATHER, create

HELLO = [{"role": "user", "content": "Hi"}]
COMPACT = '<tool_call>{"name":"get_weather","arguments":{"city":"Rome"}}</tool_call>'


@pytest.fixture
def restarted(tokenizer, tmp_path):
    """Start a gateway on the same data; the one before has to be stopped."""
    return lambda: running(FakeDeployment(tokenizer, tmp_path))


def ids_of(record) -> list[int]:
    return record["generations"][0]["prompt_ids"] + record["generations"][0]["output_ids"]


def goes_on(records) -> bool:
    before, after = records[-2:]
    whole = ids_of(before)
    return (
        after["generations"][0]["prompt_ids"][: len(whole)] == whole and after["parent_id"] == before["agent_record_id"]
    )


def test_chat_goes_on_with_the_recorded_tokens(restarted):
    with restarted() as gateway:
        letters = [gateway.deployment.chat.tokenizer.encode_now(letter)[0] for letter in "hello"]
        gateway.engine.expect(ids=[*letters, 2])
        first = gateway.chat().json()["choices"][0]["message"]
    with restarted() as gateway:
        gateway.chat(messages=[*HELLO, first, *HELLO])
        assert goes_on(gateway.records())


def test_tool_calls_too_and_streams(restarted):
    with restarted() as gateway:
        gateway.engine.expect(text=COMPACT)
        with gateway.openai.chat.completions.stream(model="m", messages=HELLO, tools=[WEATHER]) as stream:
            message = stream.get_final_completion().choices[0].message.model_dump(exclude_none=True)
        message["tool_calls"] = [
            {key: call[key] for key in ("id", "type", "function")} for call in message["tool_calls"]
        ]
        for call in message["tool_calls"]:
            call["function"].pop("parsed_arguments", None)
        message.pop("parsed", None)
    with restarted() as gateway:
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
        create(gateway, messages=[*HELLO, message, result], tools=[WEATHER])
        assert goes_on(gateway.records())


def test_messages_and_stop_strings(restarted):
    with restarted() as gateway:
        message = client(gateway).messages.create(model="m", max_tokens=99, messages=HELLO, stop_sequences=[" friend"])
        assert message.content[0].text == "Hello there,"
    with restarted() as gateway:
        turns = [*HELLO, {"role": "assistant", "content": message.content}, *HELLO]
        client(gateway).messages.create(model="m", max_tokens=99, messages=turns)
        assert goes_on(gateway.records())


def test_responses_by_their_id(restarted):
    with restarted() as gateway:
        first = gateway.openai.responses.create(model="m", input="Hi")
        second = gateway.openai.responses.create(model="m", input="Go on", previous_response_id=first.id)
    with restarted() as gateway:
        gateway.openai.responses.create(model="m", input="And?", previous_response_id=second.id)
        assert goes_on(gateway.records())
        assert gateway.openai.responses.retrieve(first.id).output_text == first.output_text


def test_edits_are_marked_after_a_restart_too(restarted):
    with restarted() as gateway:
        gateway.chat()
    with restarted() as gateway:
        gateway.chat(messages=[*HELLO, {"role": "assistant", "content": "Edited."}, *HELLO])
        first, second = gateway.records()
        assert (second["parent_id"], second["fork_of"]) == (None, first["agent_record_id"])


def test_only_the_newest_records_of_a_scenario_are_read(restarted, monkeypatch):
    monkeypatch.setattr(recall, "NEWEST", 3)
    with restarted() as gateway:
        for number in range(8):
            gateway.chat(messages=[{"role": "user", "content": f"Hi {number}"}])
            gateway.chat(headers={"x-reef-scenario": "other"})
        answer = gateway.records()[0]
    with restarted() as gateway:
        for number in (0, 7):
            turns = [
                {"role": "user", "content": f"Hi {number}"},
                {"role": "assistant", "content": "Hello there, friend."},
            ]
            gateway.chat(messages=[*turns, *HELLO])
        *_, old, new = gateway.records(limit=100)
        assert old["parent_id"] is None and new["parent_id"] not in (None, answer["agent_record_id"])


def test_a_conversation_of_one_turn_reads_nothing(restarted):
    with restarted() as gateway:
        gateway.chat()
    with restarted() as gateway:
        pages = []
        inner = gateway.deployment.storage.page

        async def page(*args, **options):
            pages.append(options)
            return await inner(*args, **options)

        gateway.deployment.storage.page = page
        gateway.chat()
        assert pages == []
        for _ in range(3):
            gateway.chat(messages=[*HELLO, {"role": "assistant", "content": "Hello there, friend."}, *HELLO])
        read = len(pages)
        gateway.chat(messages=[*HELLO, {"role": "assistant", "content": "Other."}, *HELLO])
        assert 0 < read == len(pages)  # once for the scenario


def test_records_that_are_no_conversations_do_not_matter(restarted):
    with restarted() as gateway:
        gateway.http.post("/v1/completions", json={"model": "m", "prompt": "Once"})
        gateway.engine.expect(cut_after=2)
        gateway.chat(stream=True)
        gateway.chat()
        gateway.engine.expect()
        message = gateway.chat(messages=[{"role": "user", "content": "Last"}]).json()["choices"][0]["message"]
    with restarted() as gateway:
        gateway.chat(messages=[{"role": "user", "content": "Last"}, message, *HELLO])
        assert goes_on(gateway.records())


def test_a_request_of_an_older_format_is_passed_over(restarted):
    with restarted() as gateway:
        message = gateway.chat().json()["choices"][0]["message"]
    with restarted() as gateway:
        storage = gateway.deployment.storage
        inner = storage.page

        async def page(*args, **options):
            found = await inner(*args, **options)
            return [replace(record, request=b'{"strange": 1}') for record in found]

        storage.page = page
        assert gateway.chat(messages=[*HELLO, message, *HELLO]).status_code == 200


def test_the_whole_deployment(tiny_model, tmp_path):
    """The second process has the tokens of the first one's answer from its records, not from its text."""
    hello = [{"role": "user", "content": "Hello"}]
    options = {"model": "m", "max_tokens": 64, "seed": 3, "extra_body": {"ignore_eos": True}}
    with serving(tmp_path, tiny_model, **{"inference.dtype": "float32"}) as real:
        answer = real.openai.chat.completions.create(messages=hello, **options)
        (before,) = real.records()
        sampled = before["generations"][0]
        assert real.deployment.chat.tokenizer.encode_now(answer.choices[0].message.content) != sampled["output_ids"]
    with serving(tmp_path, tiny_model, **{"inference.dtype": "float32"}) as real:
        messages = [*hello, answer.choices[0].message.model_dump(), *hello]
        real.openai.chat.completions.create(messages=messages, **options)
        after = real.records()[-1]
        whole = sampled["prompt_ids"] + sampled["output_ids"]
        assert after["generations"][0]["prompt_ids"][: len(whole)] == whole
        assert after["parent_id"] == before["agent_record_id"]
