"""The table of docs/prefix-sharing.md on a real SGLang server that runs with Reef's plugin."""

from __future__ import annotations

import asyncio
import json

import pytest

from reef.errors import EngineError
from reef.runtime.interfaces import Ending, MemoryRegion, PauseMode, WeightKind
from tests.engines.sglang import PREFIX, ask, assert_scores, rescored, start, until

pytestmark = pytest.mark.timeout(3600)  # a server starts in half a minute, on a busy machine in many

REGIONS = [MemoryRegion.WEIGHTS, MemoryRegion.KV_CACHE]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"enum": [1, 2, 3]}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


def slow_schema(number: int) -> str:
    """One that takes llguidance two seconds to compile, as all alternatives are compared, and is in no cache."""
    either: dict[str, object] = {}
    for row in range(5):
        words = [{"word": {"const": f"{number}-{row}-{index}"}} for index in range(1800)]
        either[str(row)] = {"oneOf": [{"type": "object", "properties": word, "required": ["word"]} for word in words]}
    return json.dumps({"type": "object", "properties": either})


@pytest.fixture(autouse=True)
def base(served):
    served.to_base()


def test_retract_shares_within_a_release_and_nothing_across(served, weights) -> None:
    async def test(handler) -> None:
        prompt = PREFIX
        assert (await ask(handler, prompt)).cached_tokens == 0
        assert (await ask(handler, prompt)).cached_tokens == len(prompt) - 1
        load = served.fresh(weights[0])
        behind = await asyncio.to_thread(served.publish, load, PauseMode.RETRACT)
        assert (behind.stats["cached_tokens"], behind.free_pages) == (0, behind.total_pages)
        first, second = await ask(handler, prompt), await ask(handler, prompt)
        assert (first.cached_tokens, second.cached_tokens) == (0, len(prompt) - 1)
        assert set(first.load_ids + second.load_ids) == {load.runtime_load_id}
        for answer in (first, second):
            assert_scores(answer, weights[0], prompt)

    served.run(test)


def test_version_keys_share_under_in_place(served, weights) -> None:
    """Nothing is flushed: the old entries are still there, and no request finds them."""

    async def test(handler) -> None:
        prompt = [*PREFIX[100:], 5]
        await ask(handler, prompt)
        assert (await ask(handler, prompt)).cached_tokens == len(prompt) - 1
        load = served.fresh(weights[0])
        behind = await asyncio.to_thread(served.publish, load, PauseMode.IN_PLACE)
        assert behind.stats["cached_tokens"] >= len(prompt)
        first, second = await ask(handler, prompt), await ask(handler, prompt)
        assert (first.cached_tokens, second.cached_tokens) == (0, len(prompt) - 1)
        for answer in (first, second):
            assert set(answer.load_ids) == {load.runtime_load_id}
            assert_scores(answer, weights[0], prompt)

    served.run(test)


def test_who_waits_through_an_in_place_publication_uses_no_old_prefix(served, weights) -> None:
    async def test(handler) -> None:
        before = served.served()
        prompt = [*PREFIX[:600], 7]
        await ask(handler, prompt)  # now there is an old prefix to find
        running = [start(handler, [3000 + number, 4, 5], 120) for number in range(8)]  # all the engine runs at once
        for one in running:
            await one.has(1)
        waiting = start(handler, prompt, 8)
        await until(lambda: served.report().waiting == 1)
        load = served.fresh(weights[1])
        await asyncio.to_thread(served.publish, load, PauseMode.IN_PLACE)
        answer = await waiting.task
        assert answer.cached_tokens == 0
        assert set(answer.load_ids) == {load.runtime_load_id}
        assert_scores(answer, weights[1], prompt)
        for one in running:
            frozen = await one.task
            assert (frozen.ending, len(frozen.token_ids)) == (Ending.LENGTH, 120)
            switch = frozen.load_ids.index(load.runtime_load_id)
            assert frozen.load_ids == [before] * switch + [load.runtime_load_id] * (120 - switch) and switch > 0
            expected = rescored(served.model, one.prompt_ids, frozen.token_ids[:switch])
            assert frozen.logprobs[:switch] == pytest.approx(expected, abs=1e-4)

    served.run(test)


def test_retract_with_long_and_json_requests_in_flight(served, weights) -> None:
    async def test(handler) -> None:
        before = served.served()
        long = [start(handler, [2000 + number, *PREFIX[:200]], 100) for number in range(8)]
        shaped = [start(handler, [2100 + number, *PREFIX[:200]], 80, schema=json.dumps(SCHEMA)) for number in range(16)]
        for one in long:
            await one.has(5)
        load = served.fresh(weights[0])
        behind = await asyncio.to_thread(served.publish, load, PauseMode.RETRACT)
        assert (behind.running, behind.free_pages) == (0, behind.total_pages)
        assert behind.waiting == 24
        for one in long:
            answer = await one.task
            assert (answer.ending, len(answer.token_ids)) == (Ending.LENGTH, 100)
            switch = answer.load_ids.index(load.runtime_load_id)
            assert answer.load_ids == [before] * switch + [load.runtime_load_id] * (100 - switch) and switch >= 5
            # Retracted, so the rest was computed by the new weights alone: every token can be rescored.
            expected = rescored(served.model, one.prompt_ids, answer.token_ids)[:switch]
            expected += rescored(weights[0], one.prompt_ids, answer.token_ids)[switch:]
            assert answer.logprobs == pytest.approx(expected, abs=1e-4)
        from transformers import AutoTokenizer

        from tests.models import tiny_llama

        tokenizer = AutoTokenizer.from_pretrained(tiny_llama())
        for one in shaped:
            answer = await one.task
            assert answer.ending is Ending.STOP
            value = json.loads(tokenizer.decode(answer.token_ids, skip_special_tokens=True))
            assert set(value) == {"name", "count"} and value["count"] in (1, 2, 3)

    served.run(test)


def test_grammar_that_still_compiles_does_not_hold_a_barrier_up(served) -> None:
    async def test(handler) -> None:
        for number in range(0, 10, 2):  # until the compilation outlasts the barrier
            schemas = [slow_schema(number), slow_schema(number + 1)]
            asked = [start(handler, [50, 51, 52], 40, schema=schema) for schema in schemas]
            await until(lambda: served.report().stats["compiling"] >= 1)
            await asyncio.to_thread(served.backend.pause, PauseMode.RETRACT)
            compiling = served.report().stats["compiling"]
            await asyncio.to_thread(served.backend.resume)
            for one in asked:
                answer = await one.task
                assert answer.ending in (Ending.STOP, Ending.LENGTH) and answer.token_ids
            if compiling:
                return
        pytest.fail("what was asked was compiled before the barrier: the schemas are too small")

    served.run(test)


def test_colocated_release_and_restore_behind_the_barrier(served, weights) -> None:
    async def test(handler) -> None:
        prompt = [*PREFIX[:1500], 9]
        await ask(handler, prompt)
        asked = start(handler, [600, 601, 602], 300)
        await asked.has(5)
        load = served.fresh(weights[1])
        backend = served.backend
        await asyncio.to_thread(backend.stage, load)
        await asyncio.to_thread(backend.pause, PauseMode.RETRACT)
        [given] = await asyncio.to_thread(backend.release_memory, REGIONS)
        weights_bytes = (served.model / "model.safetensors").stat().st_size
        assert given.bytes_before - given.bytes_after > 0.9 * weights_bytes, given
        assert (given.owner, set(given.released)) == ("engine-0", set(REGIONS))
        await asyncio.to_thread(backend.restore_memory)
        await asyncio.to_thread(backend.activate, "", load.runtime_load_id)
        await asyncio.to_thread(backend.resume)
        answer = await asked.task
        assert (answer.ending, len(answer.token_ids)) == (Ending.LENGTH, 300)
        expected = rescored(weights[1], asked.prompt_ids, answer.token_ids)
        switch = answer.load_ids.index(load.runtime_load_id)
        assert answer.logprobs[switch:] == pytest.approx(expected[switch:], abs=1e-4)
        again = await ask(handler, prompt)
        assert again.cached_tokens == 0
        assert_scores(again, weights[1], prompt)

    served.run(test)


def test_memory_is_restored_with_the_weights_that_were_there(served) -> None:
    async def test(handler) -> None:
        before = await ask(handler, PREFIX[:50])
        await asyncio.to_thread(served.backend.pause, PauseMode.RETRACT)
        await asyncio.to_thread(served.backend.release_memory, REGIONS)
        await asyncio.to_thread(served.backend.restore_memory)
        await asyncio.to_thread(served.backend.restore_memory)  # harmless when nothing is released
        await asyncio.to_thread(served.backend.resume)
        after = await ask(handler, PREFIX[:50])
        assert (after.token_ids, after.cached_tokens) == (before.token_ids, 0)
        assert_scores(after, served.model, PREFIX[:50])

    served.run(test)


def test_memory_is_not_released_under_frozen_requests(served) -> None:
    served.backend.pause(PauseMode.IN_PLACE)
    try:
        with pytest.raises(EngineError, match="behind a barrier that retracted"):
            served.backend.release_memory(REGIONS)
    finally:
        served.backend.resume()


def test_two_adapters_share_nothing(served, adapters) -> None:
    first, second = (served.fresh(path, WeightKind.LORA) for path in adapters[:2])

    async def test(handler) -> None:
        prompt = [*PREFIX[:1000], 11]
        await asyncio.to_thread(served.publish, first, PauseMode.RETRACT, "a")
        await asyncio.to_thread(served.publish, second, PauseMode.RETRACT, "b")
        cold, warm = await ask(handler, prompt, lane="a"), await ask(handler, prompt, lane="a")
        other, plain = await ask(handler, prompt, lane="b"), await ask(handler, prompt)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, len(prompt) - 1)
        assert (other.cached_tokens, plain.cached_tokens) == (0, 0)
        for answer, load, adapter in ((warm, first, adapters[0]), (other, second, adapters[1])):
            assert set(answer.load_ids) == {load.runtime_load_id}
            assert_scores(answer, served.model, prompt, adapter)
        assert_scores(plain, served.model, prompt)
        third = served.fresh(adapters[2], WeightKind.LORA)
        behind = await asyncio.to_thread(served.publish, third, PauseMode.RETRACT, "a")
        assert behind.stats["cached_tokens"] == 0
        cleared = await ask(handler, prompt, lane="b")
        assert cleared.cached_tokens == 0
        replaced = await ask(handler, prompt, lane="a")
        assert (set(replaced.load_ids), replaced.cached_tokens) == ({third.runtime_load_id}, 0)
        assert_scores(replaced, served.model, prompt, adapters[2])

    served.run(test)
