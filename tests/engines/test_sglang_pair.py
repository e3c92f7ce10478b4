"""Two engines behind SGLang's router, as disjoint deployments are by default where Reef's keys are turned off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from reef.errors import EngineUncertain
from reef.inference.sglang.backend import SGLangBackend
from reef.runtime.interfaces import Ending, PauseMode
from tests.engines.sglang import PREFIX, Served, ask, assert_scores, rescored, sglang_config, start

pytestmark = pytest.mark.timeout(3600)  # a server starts in half a minute, on a busy machine in many


@pytest.fixture(scope="module")
def pair(engine_python, tiny_model, tmp_path_factory) -> Iterator[Served]:
    config = sglang_config(tiny_model, engines=2, version_keys=False)
    mode = config.pausing(colocated=False, disjoint_prefix_sharing=False)
    logs = tmp_path_factory.mktemp("pair")
    backend = SGLangBackend(config, mode=mode, lora=False, base_content_id="base", logs=logs)
    backend.start()
    try:
        yield Served(backend, tiny_model, logs)
    finally:
        backend.close()


def test_disjoint_default_shares_nothing_and_requests_continue_across_a_publication(pair, weights) -> None:
    async def test(handler) -> None:
        await ask(handler, PREFIX)
        assert (await ask(handler, PREFIX)).cached_tokens == 0
        asked = [start(handler, [4000 + number, 1, 2], 100) for number in range(4)]
        for one in asked:
            await one.has(3)
        load = pair.fresh(weights[0])
        await asyncio.to_thread(pair.publish, load, PauseMode.IN_PLACE)
        for one in asked:
            answer = await one.task
            assert (answer.ending, len(answer.token_ids)) == (Ending.LENGTH, 100)
            switch = answer.load_ids.index(load.runtime_load_id)
            assert answer.load_ids == ["engine:0"] * switch + [load.runtime_load_id] * (100 - switch) and switch >= 3
            expected = rescored(pair.model, one.prompt_ids, answer.token_ids[:switch])
            assert answer.logprobs[:switch] == pytest.approx(expected, abs=1e-4)
        fresh = await ask(handler, PREFIX[:100])
        assert_scores(fresh, weights[0], PREFIX[:100])

    pair.run(test)


def test_both_engines_serve_and_workers_can_be_taken_out(pair) -> None:
    router = pair.backend._router
    first, second = (engine.control.url for engine in pair.backend._engines)
    assert sorted(router.workers()) == sorted([first, second])
    router.set_workers([first], 60)
    assert router.workers() == [first]
    router.set_workers([first, second], 60)

    async def test(handler) -> None:
        asked = [start(handler, [5000 + 97 * number] * 30, 40) for number in range(12)]
        for one in asked:
            await one.has(1)
        running = [report.running for report in await asyncio.to_thread(pair.backend.reports)]
        for one in asked:
            await one.task
        assert all(running), running

    pair.run(test)


def test_update_that_only_one_engine_did_leaves_doubt(pair, weights) -> None:
    """Last in this module: the engines must be replaced afterwards."""
    load = pair.fresh(weights[1])
    pair.backend.stage(load)
    pair.backend.pause(PauseMode.IN_PLACE)

    def fails(path: str, weights: str) -> None:
        raise EngineUncertain(f"{path} was sent, and nobody answered")

    pair.backend._engines[1].control.update_weights = fails  # as if it had died in that moment
    with pytest.raises(EngineUncertain, match=r"nobody answered; other engines did it"):
        pair.backend.activate("", load.runtime_load_id)
    assert pair.backend.health() is not None
