from __future__ import annotations

import asyncio
import threading

import pytest

from reef.errors import EngineError, InvalidRequest, Unavailable
from reef.inference.chat.messages import Conversation, Message
from reef.inference.chat.service import ChatRequest
from reef.runtime.interfaces import Ending, SamplingParams, Span
from tests.inference.chat.engines import Script


def request(*contents: str, **changes) -> ChatRequest:
    roles = ["user", "assistant"]
    messages = [Message(role=roles[index % 2], content=content) for index, content in enumerate(contents or ["Hi"])]
    conversation = Conversation(messages=messages)
    return ChatRequest(**{"request_id": "r", "conversation": conversation, "sampling": SamplingParams(), **changes})


async def collect(chat, asked: ChatRequest):
    stream = await chat.start(asked)
    try:
        return [delta async for delta in stream], stream
    finally:
        await stream.close()


def test_text_and_exact_generation_of_one_answer(chat, engine, run):
    engine.expect(text="Hello there", load_ids=("engine:0", "engine:1"))
    deltas, stream = run(collect(chat, request()))
    generation = stream.generations[0]
    assert "".join(delta.text for delta in deltas) == stream.choices[0].text == "Hello there"
    assert generation.output_ids == [*chat.tokenizer.encode_now("Hello there"), 2]
    assert generation.prompt_ids == engine.seen[0].prompt_ids
    assert generation.logprobs == [-0.5] * 3 and generation.sampled_logprobs == [-0.25] * 3
    assert generation.spans == [Span(0, 1, "engine:0"), Span(1, 3, "engine:1")]
    assert (generation.ending, generation.cached_tokens) == (Ending.STOP, 3)


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_a_stop_string_ends_the_choice_even_if_the_engine_goes_on(chat, engine, run, chunk):
    engine.expect(text="one two three four", chunk=chunk)
    _, stream = run(collect(chat, request(sampling=SamplingParams(stop=["three"]))))
    generation = stream.generations[0]
    assert stream.choices[0].text == "one two "
    assert generation.ending is Ending.STOP
    assert chat.tokenizer._tokenizer.decode(generation.output_ids) == "one two three"
    assert generation.spans[-1].end == len(generation.output_ids) == len(generation.logprobs)


def test_no_limit_means_what_the_context_leaves(chat, engine, run):
    run(collect(chat, request()))
    seen = engine.seen[0]
    assert seen.sampling.max_tokens == engine.context - len(seen.prompt_ids)


def test_a_limit_beyond_the_context_names_the_field(chat, engine, run):
    with pytest.raises(InvalidRequest, match="must be <=") as caught:
        run(chat.start(request(max_tokens=5000)))
    assert caught.value.field == "max_tokens"


def test_a_prompt_beyond_the_context_names_the_messages(chat, engine, run):
    engine.context = 8
    with pytest.raises(InvalidRequest, match="leaves no room") as caught:
        run(chat.start(request()))
    assert caught.value.field == "messages"


def test_a_token_outside_of_the_vocabulary_is_refused(chat, run):
    with pytest.raises(InvalidRequest) as caught:
        run(chat.start(request(sampling=SamplingParams(logit_bias={10**6: 1.0}))))
    assert caught.value.field == "logit_bias"


def test_several_choices_have_derived_seeds_and_interleave(chat, engine, run):
    engine.expect(delay=0.001)
    deltas, stream = run(collect(chat, request(n=3, sampling=SamplingParams(seed=7))))
    assert [seen.sampling.seed for seen in engine.seen] == [7, 8, 9]
    assert [seen.request_id for seen in engine.seen] == ["r-0", "r-1", "r-2"]
    assert {delta.index for delta in deltas[:3]} == {0, 1, 2}
    assert [choice.text for choice in stream.choices] == ["Hello there, friend."] * 3


def test_logprobs_come_with_the_text_they_belong_to(chat, engine, run):
    engine.expect(text="ab END")
    deltas, _ = run(collect(chat, request(logprobs=True, sampling=SamplingParams(stop=[" END"], top_logprobs=2))))
    tokens = [token for delta in deltas for token in delta.tokens]
    assert b"".join(token.token for token in tokens) == b"ab"
    assert all(token.logprob == -0.5 and len(token.top) == 2 for token in tokens)


def test_what_the_engine_refuses_before_its_first_chunk_is_raised(chat, engine, run):
    engine.expect(refuse=Unavailable("no engine"))
    with pytest.raises(Unavailable):
        run(collect(chat, request()))


@pytest.mark.parametrize("fault", [{"cut_after": 2}, {"die_after": 2}])
def test_an_engine_that_fails_later_cuts_the_answer(chat, engine, run, fault):
    engine.expect(**fault)
    deltas, stream = run(collect(chat, request()))
    assert deltas[-1].ending is Ending.ENGINE_CUT and deltas[-1].error
    assert stream.ending is stream.generations[0].ending is Ending.ENGINE_CUT
    assert len(stream.generations[0].output_ids) == 2


def test_a_stream_without_an_ending_is_cut(chat, engine, run):
    engine.expect(stop_without_ending=True)
    _, stream = run(collect(chat, request()))
    assert stream.ending is Ending.ENGINE_CUT


def test_one_choice_that_fails_makes_the_whole_incomplete(chat, engine, run):
    engine.script_of = lambda seen: Script(cut_after=1 if seen.request_id.endswith("1") else None)
    _, stream = run(collect(chat, request(n=2)))
    assert [generation.ending for generation in stream.generations] == [Ending.STOP, Ending.ENGINE_CUT]
    assert stream.ending is Ending.ENGINE_CUT


def test_abort_from_another_task_ends_the_iteration_and_frees_the_engine(chat, engine, run):
    engine.expect(gate=threading.Event(), text="word " * 200)

    async def leave():
        async def abort():
            while engine.at_gate < 2:
                await asyncio.sleep(0.005)
            stream.abort(Ending.CLIENT_LEFT)

        stream = await chat.start(request(n=2))
        aborting = asyncio.create_task(abort())
        deltas = [delta async for delta in stream]
        await aborting
        await stream.close()
        return deltas, stream

    deltas, stream = run(leave())
    assert deltas and stream.began
    assert [generation.ending for generation in stream.generations] == [Ending.CLIENT_LEFT] * 2
    assert sorted(engine.aborted) == ["r-0", "r-1"] and engine.running == 0


def test_closing_early_aborts_in_the_engine(chat, engine, run):
    engine.expect(delay=600)

    async def close():
        stream = await chat.start(request())
        await asyncio.sleep(0.01)
        await stream.close()
        return stream

    assert run(close()).ending is Ending.ENGINE_CUT
    assert engine.running == 0


def test_complete_returns_the_text_of_pinned_weights(chat, engine, run):
    messages = [{"role": "user", "content": "Hi"}]
    assert run(chat.complete(messages, SamplingParams(), runtime_load_id="engine:4")) == "Hello there, friend."
    assert engine.seen[0].runtime_load_id == "engine:4"
    engine.expect(cut_after=1)
    with pytest.raises(EngineError, match="scripted"):
        run(chat.complete(messages, SamplingParams()))
