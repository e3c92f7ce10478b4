"""POST /v1/chat/completions with the official client against a running gateway."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import openai
import pytest

from reef.records.sqlite import SqliteStorage
from reef.runtime.interfaces import Retention
from tests.records.values import discard
from tests.service.conftest import body, events

HELLO = [{"role": "user", "content": "Hi"}]


def test_an_answer_with_usage_and_receipt(gateway):
    raw = gateway.openai.chat.completions.with_raw_response.create(model="smollm2", messages=HELLO)
    answer = raw.parse()
    assert answer.choices[0].message.content == "Hello there, friend."
    assert (answer.choices[0].finish_reason, answer.model, answer.object) == ("stop", "smollm2", "chat.completion")
    assert answer.usage.prompt_tokens > 10 and answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert raw.headers["x-reef-agent-record-id"] == answer.model_extra["reef"]["agent_record_id"]


def test_the_record_holds_exactly_what_was_sent_and_seen(gateway):
    response = gateway.chat(headers={"x-reef-tag-team": "blue", "x-reef-scenario": "s"}, temperature=0.5)
    record = gateway.records("s")[0]
    assert record["agent_record_id"] == response.headers["x-reef-agent-record-id"]
    assert record["request"].encode() == response.request.content
    assert record["response"].encode() == response.content
    assert (record["status"], record["route"], record["tags"]) == (200, "/v1/chat/completions", {"team": "blue"})
    assert record["release_id"] == gateway.http.get("/reef/scenarios/s/releases").json()["head"]
    generation = record["generations"][0]
    assert generation["prompt_ids"] == gateway.engine.seen[0].prompt_ids
    assert (generation["ending"], generation["temperature"]) == ("stop", 0.5)
    assert generation["spans"] == [{"start": 0, "end": 6, "runtime_load_id": "engine:0"}]


def test_the_release_is_the_head_when_the_request_was_admitted(gateway):
    gateway.chat()
    scenario = gateway.deployment.scenarios()[0]
    admitted = scenario.head.release_id
    gateway.engine.expect(delay=0.1)
    gateway.engine.on_request = lambda: setattr(scenario, "head", replace(scenario.head, release_id="later"))
    gateway.chat()
    assert scenario.head.release_id == "later"
    assert gateway.records()[1]["release_id"] == admitted


def test_the_scenario_is_the_lane(gateway):
    gateway.chat(headers={"x-reef-scenario": "Team.A-1_b"})
    gateway.chat()
    assert [seen.lane for seen in gateway.engine.seen] == ["Team.A-1_b", "default"]


def test_sampling_parameters_reach_the_engine(gateway):
    gateway.openai.chat.completions.create(
        model="any", messages=HELLO, max_completion_tokens=5, temperature=0.25, top_p=0.5, stop=["x"], seed=3,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"5": 2}, user="u", metadata={"a": "b"}, store=True,
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
    )  # fmt: skip
    sampling = gateway.engine.seen[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (5, 0.25, 0.5, 3)
    assert (sampling.stop, sampling.logit_bias, sampling.top_k, sampling.min_p) == (["x"], {5: 2.0}, 4, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.ignore_eos) == (1.1, True)


def test_every_kind_of_message_reaches_the_template(gateway):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "So 42.", "refusal": None, "annotations": [], "audio": None},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    assert gateway.chat(messages=messages).status_code == 200
    prompt = gateway.deployment.chat.tokenizer._tokenizer.decode(gateway.engine.seen[0].prompt_ids)
    for part in ("system\nBe brief.", "user\nHello<", "user\n<tool_response>\n42\n", "assistant\nSo 42.", "user\nAnd?"):
        assert part in prompt


def test_the_token_limit_is_a_finish_reason(gateway):
    answer = gateway.openai.chat.completions.create(model="m", messages=HELLO, max_tokens=2)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 2)


def test_logprobs(gateway):
    answer = gateway.openai.chat.completions.create(model="m", messages=HELLO, logprobs=True, top_logprobs=2)
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    assert bytes(tokens[0].bytes).decode() == tokens[0].token and tokens[0].logprob == -0.5
    assert [len(token.top_logprobs) for token in tokens] == [2] * len(tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(gateway, stream):
    answer = gateway.openai.chat.completions.create(model="m", messages=HELLO, n=3, seed=1, stream=stream)
    if stream:
        texts = ["", "", ""]
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = [choice.message.content for choice in answer.choices]
    assert texts == ["Hello there, friend."] * 3
    assert len(gateway.records()[0]["generations"]) == 3


def test_the_shape_of_a_stream(gateway):
    response = gateway.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = events(response.text)
    assert found[-1] == "[DONE]"
    first, *content, last = found[:-1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in content) == "Hello there, friend."
    assert all(chunk["choices"][0]["finish_reason"] is None and "usage" not in chunk for chunk in content)
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "stop"
    assert last["reef"]["agent_record_id"] == response.headers["x-reef-agent-record-id"]
    assert len({chunk["id"] for chunk in found[:-1]}) == 1
    record = gateway.records()[0]
    assert record["response"].encode() == response.content
    assert record["agent_record_id"] == last["reef"]["agent_record_id"]


def test_the_usage_chunk_comes_exactly_when_asked_for(gateway):
    found = events(gateway.chat(stream=True, stream_options={"include_usage": True}).text)
    assert found[-2]["choices"] == [] and found[-2]["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in found[:-2])
    assert "reef" in found[-3] and "reef" not in found[-2]


def test_streamed_logprobs_cover_the_text(gateway):
    found = events(gateway.chat(stream=True, logprobs=True).text)[:-1]
    tokens = [
        token["token"] for chunk in found if (shown := chunk["choices"][0]["logprobs"]) for token in shown["content"]
    ]
    assert "".join(tokens) == "Hello there, friend."


def test_a_stop_string_is_never_streamed(gateway):
    gateway.engine.expect(text="one two three four")
    found = events(gateway.chat(stream=True, stop="three").text)[:-1]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found) == "one two "
    assert found[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_async_client_streams(gateway, run):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
            return [chunk async for chunk in stream]

    chunks = run(ask())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there, friend."
    assert chunks[-1].model_extra["reef"]["agent_record_id"]


def test_the_client_s_stream_helper_assembles_the_answer(gateway):
    with gateway.openai.chat.completions.stream(model="m", messages=HELLO) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == "Hello there, friend."


def test_a_conversation_goes_on_from_the_recorded_ids(gateway):
    first = gateway.chat().json()["choices"][0]["message"]
    gateway.chat(messages=[*HELLO, first, {"role": "user", "content": "Go on"}])
    before, after = gateway.records()
    whole = before["generations"][0]["prompt_ids"] + before["generations"][0]["output_ids"]
    assert after["generations"][0]["prompt_ids"][: len(whole)] == whole


def test_models(gateway):
    assert [model.id for model in gateway.openai.models.list()] == ["smollm2"]


# ------------------------------------------------------------------ repeating a request with its id


@pytest.mark.parametrize("stream", [False, True])
def test_repeating_a_request_with_its_id_returns_the_stored_bytes(gateway, stream):
    headers = {"x-reef-record-id": "mine-1"}
    first, second = gateway.chat(headers=headers, stream=stream), gateway.chat(headers=headers, stream=stream)
    assert first.content == second.content and second.status_code == 200
    assert first.headers["content-type"] == second.headers["content-type"]
    assert first.headers["x-reef-agent-record-id"] == second.headers["x-reef-agent-record-id"] == "mine-1"
    assert len(gateway.records()) == len(gateway.engine.seen) == 1


def test_another_request_with_the_same_id_is_a_conflict(gateway):
    headers = {"x-reef-record-id": "mine-1"}
    gateway.chat(headers=headers)
    response = gateway.chat(headers=headers, temperature=0.5)
    assert response.status_code == 409 and response.json()["error"]["code"] == "conflict"
    assert len(gateway.records()) == 1


def test_the_same_request_twice_at_once_is_answered_once(gateway, run):
    gateway.engine.expect(delay=0.02)

    async def both():
        import asyncio

        import httpx

        async with httpx.AsyncClient(base_url=gateway.url) as client:
            ask = lambda: client.post("/v1/chat/completions", json=body(), headers={"x-reef-record-id": "x"})  # noqa: E731
            return await asyncio.gather(ask(), ask(), ask())

    answers = run(both())
    assert len({answer.content for answer in answers}) == 1
    assert len(gateway.engine.seen) == 1


def test_what_retention_emptied_is_said_and_never_sent(gateway, run):
    headers = {"x-reef-record-id": "mine-1"}
    first = gateway.chat(headers=headers)

    async def retain() -> None:  # as another process would
        storage = SqliteStorage(gateway.deployment.storage.database.path)
        await storage.open()
        await storage.commit(discard("c", ["mine-1"], scenario="default"))
        assert (await storage.purge(Retention(consumed_before=1e12), 10)).records == 1
        await storage.close()

    run(retain())
    again = gateway.chat(headers=headers)
    assert again.status_code == 409 and "emptied by retention" in again.text
    [record] = gateway.records()
    assert record["purged"]["request"] == hashlib.sha256(first.request.content).hexdigest()
    assert record["purged"]["response"] == hashlib.sha256(first.content).hexdigest()
    assert (record["request"], record["response"], record["generations"]) == ("", "", [])
