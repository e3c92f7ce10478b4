"""Requests and lifecycle of a real SGLang engine."""

from __future__ import annotations

import asyncio
import json
import math
import re

import pytest
from transformers import AutoTokenizer

from reef.errors import ConfigError, EngineError, InvalidRequest, Unavailable
from reef.inference.chat.grammars import WHITESPACE
from reef.inference.sglang.backend import SGLangBackend
from reef.inference.sglang.client import SGLangHandler
from reef.runtime.interfaces import (
    BASE_LOAD_ID,
    Ending,
    GenerateRequest,
    Grammar,
    PauseMode,
    SamplingParams,
    WeightKind,
)
from tests.engines.sglang import PREFIX, ask, assert_scores, rescored, sglang_config, start, until

pytestmark = pytest.mark.timeout(3600)  # a server starts in half a minute, on a busy machine in many

PROMPT = PREFIX[:40]
WS = f"({WHITESPACE})?"


def test_greedy_is_what_transformers_says(served) -> None:
    async def test(handler) -> None:
        answer = await ask(handler, PROMPT, 24, top_logprobs=3)
        assert (answer.ending, len(answer.token_ids), set(answer.load_ids)) == (Ending.LENGTH, 24, {BASE_LOAD_ID})
        assert_scores(answer, served.model, PROMPT)
        assert answer.sampled_logprobs == [0.0] * 24
        for token, logprob, top in zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True):
            assert len(top) == 3 and top[0] == (token, pytest.approx(logprob, abs=1e-5))

    served.run(test)


def test_score_is_what_transformers_says(served) -> None:
    [scores] = served.backend.score(BASE_LOAD_ID, PROMPT)
    assert scores == pytest.approx(rescored(served.model, PROMPT[:1], PROMPT[1:]), abs=1e-4)


def test_a_paused_engine_scores_too_and_stays_paused(served) -> None:
    """As a publication needs it that is tried again on engines that were replaced."""
    served.backend.pause(PauseMode.RETRACT)
    try:
        [scores] = served.backend.score(served.served(), PROMPT)
        assert served.report().paused
    finally:
        served.backend.resume()
    assert scores == pytest.approx(rescored(served.model, PROMPT[:1], PROMPT[1:]), abs=1e-4)


def test_both_log_probabilities_of_a_drawn_token(served) -> None:
    """At temperature 1 of the model, and of the distribution that was drawn from."""

    async def test(handler) -> None:
        wide = await ask(handler, PROMPT, 16, temperature=0.5)
        assert_scores(wide, served.model, PROMPT)
        expected = drawn(served.model, PROMPT, wide.token_ids, temperature=0.5)
        assert wide.sampled_logprobs == pytest.approx(expected, abs=1e-3)
        cut = await ask(handler, PROMPT, 16, temperature=0.8, top_k=20, top_p=0.9)
        assert_scores(cut, served.model, PROMPT)
        expected = drawn(served.model, PROMPT, cut.token_ids, temperature=0.8, top_k=20, top_p=0.9)
        assert cut.sampled_logprobs == pytest.approx(expected, abs=1e-3)

    served.run(test)


def drawn(model, prompt_ids, output_ids, *, temperature, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """Log-probability of each token under what is left after the filters."""
    import torch

    from tests.engines.sglang import _reference

    ids = torch.tensor([[*prompt_ids, *output_ids]])
    with torch.inference_mode():
        logits = _reference(model, None)(ids).logits[0, len(prompt_ids) - 1 : -1]
    found = []
    for row, token in zip((logits / temperature).softmax(-1), output_ids, strict=True):
        ordered, order = row.sort(descending=True)
        keep = (ordered.cumsum(0) - ordered <= top_p) & (ordered >= ordered[0] * min_p)
        if top_k:
            keep[top_k:] = False
        place = (order == token).nonzero().item()
        assert keep[place]
        found.append(math.log(row[token] / ordered[keep].sum()))
    return found


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 50}, {"min_p": 0.01}])
def test_a_seed_draws_the_same_whatever_runs_beside_it(served, filters) -> None:
    async def test(handler) -> None:
        options = {"temperature": 1.0, "seed": 2**63 + 5, **filters}
        alone = await ask(handler, PROMPT, 24, **options)
        beside = [start(handler, PREFIX[number : number + 30], 40, temperature=1.0, top_p=0.8) for number in range(3)]
        for one in beside:
            await one.has(2)
        again = start(handler, PROMPT, 24, **options)
        other = start(handler, PROMPT, 24, **{**options, "seed": 6})
        free = [start(handler, PROMPT, 24, temperature=1.0, **filters) for _ in range(2)]
        for one in (again, other, *free, *beside):
            await one.task
        assert again.answer.token_ids == alone.token_ids
        assert len({tuple(one.answer.token_ids) for one in (again, other, *free)}) == 4
        assert_scores(again.answer, served.model, PROMPT)
        expected = drawn(served.model, PROMPT, alone.token_ids, temperature=1.0, **filters)
        assert alone.sampled_logprobs == pytest.approx(expected, abs=1e-3)

    served.run(test)


def test_penalties_bias_and_grammar_leave_the_models_log_probabilities_alone(served) -> None:
    async def test(handler) -> None:
        for sampling in (
            {"presence_penalty": 1.5, "repetition_penalty": 1.3},
            {"logit_bias": {77: 8.0}},
            {"schema": json.dumps({"enum": ["north", "south"]})},
        ):
            answer = await ask(handler, PROMPT, 12, **sampling)
            assert_scores(answer, served.model, PROMPT)

    served.run(test)


def test_end_by_stop_token_and_stop_string(served) -> None:
    async def test(handler) -> None:
        free = await ask(handler, PROMPT, 12)
        by_token = await ask(handler, PROMPT, 12, stop_token_ids=[free.token_ids[5]], ignore_eos=False)
        assert (by_token.ending, by_token.token_ids) == (Ending.STOP, free.token_ids[:6])
        word = AutoTokenizer.from_pretrained(served.model).decode(free.token_ids[3:4]).strip()
        by_string = await ask(handler, PROMPT, 12, stop=[word])
        assert (by_string.ending, by_string.stopped_by) == (Ending.STOP, word)
        assert by_string.token_ids == free.token_ids[: len(by_string.token_ids)] and len(by_string.token_ids) <= 4

    served.run(test)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"max_tokens": 4090}, "sampling.max_tokens"),
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"stop_token_ids": [10**7]}, "sampling.stop_token_ids"),
        ({"stop_token_ids": [5]}, "sampling.stop_token_ids"),
    ],
)
def test_what_the_engine_cannot_honour_is_refused_by_name(served, sampling, field) -> None:
    async def test(handler) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await ask(handler, PROMPT, **{"max_tokens": 8, **sampling})
        assert caught.value.field == field

    served.run(test)


def test_grammar_that_does_not_compile_is_the_callers_fault(served) -> None:
    async def test(handler) -> None:
        with pytest.raises(InvalidRequest, match="grammar"):
            await ask(handler, PROMPT, schema='{"type": "no such type"}')

    served.run(test)


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (Grammar("regex", r"[a-c]{3}(x|yy)\d"), r"[a-c]{3}(x|yy)\d"),
        (Grammar("choice", '["a b-c#", "x\\ny", "é{}"]'), r"a b-c#|x\ny|é\{\}"),
        (Grammar("json_object", ""), r"\{\}"),
        (
            Grammar("json_schema", '{"type": "array", "items": {"const": 5}, "minItems": 2, "maxItems": 2}'),
            rf"\[{WS}5{WS},{WS}5{WS}\]",
        ),
        (Grammar("lark", 'start: "<" %json {"enum": [true, false]} ">"'), "<(true|false)>"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_every_kind_of_grammar_shapes_the_answer(served, grammar, matches) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served.model)
    [closing] = tokenizer.encode("}", add_special_tokens=False)

    async def test(handler) -> None:
        answer = await ask(handler, PROMPT, 40, grammar=grammar, ignore_eos=False, logit_bias={closing: 50.0})
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert answer.ending is Ending.STOP and re.fullmatch(matches, text), text

    served.run(test)


def test_grammar_that_cannot_go_on_cuts_its_own_request(served) -> None:
    """Too complex to follow, which shows only after some tokens."""
    grammar = Grammar("regex", "(([a-z]{1,300}){1,300}){1,300}")

    async def test(handler) -> None:
        other = start(handler, PROMPT, 40, grammar=Grammar("regex", "[a-z ]{200}"))
        answer = await ask(handler, PROMPT, 300, grammar=grammar, ignore_eos=False)
        assert answer.ending is Ending.ENGINE_CUT and answer.token_ids, answer
        assert "the grammar cannot go on: lexer error: too many expressions constructed" in answer.error
        assert (await other.task).ending is Ending.LENGTH

    served.run(test)


def test_client_that_leaves_frees_the_engine(served) -> None:
    async def test(handler) -> None:
        asked = start(handler, PROMPT, 2000)
        await asked.has(2)
        asked.task.cancel()
        await until(lambda: served.report().running == 0)

    served.run(test)


def test_pinned_load_and_unknown_load(served, adapters) -> None:
    load = served.fresh(adapters[0], WeightKind.LORA)

    async def test(handler) -> None:
        await asyncio.to_thread(served.backend.stage, load)
        answer = await ask(handler, PROMPT, load=load.runtime_load_id)
        assert set(answer.load_ids) == {load.runtime_load_id}
        assert_scores(answer, served.model, PROMPT, adapters[0])
        await asyncio.to_thread(served.backend.drop, load.runtime_load_id)
        with pytest.raises(Unavailable, match=f"{load.runtime_load_id} is not resident"):
            await ask(handler, PROMPT, load=load.runtime_load_id)

    served.run(test)


def test_unloading_waits_for_who_still_uses_it(served, adapters) -> None:
    old, new = (served.fresh(path, WeightKind.LORA) for path in adapters[:2])

    async def test(handler) -> None:
        await asyncio.to_thread(served.publish, old, PauseMode.IN_PLACE, "lease")
        asked = start(handler, PROMPT, 150, lane="lease")
        await asked.has(2)
        await asyncio.to_thread(served.publish, new, PauseMode.IN_PLACE, "lease")
        await asyncio.to_thread(served.backend.drop, old.runtime_load_id)
        assert old.runtime_load_id in resident(served)
        assert (await ask(handler, PROMPT, lane="lease")).load_ids[0] == new.runtime_load_id
        answer = await asked.task
        assert (len(answer.token_ids), set(answer.load_ids)) == (150, {old.runtime_load_id})
        assert_scores(answer, served.model, PROMPT, adapters[0])
        other = served.fresh(adapters[2], WeightKind.LORA)
        await asyncio.to_thread(served.backend.stage, other)  # the next call unloads what nobody uses any more
        assert old.runtime_load_id not in resident(served)
        await asyncio.to_thread(served.backend.drop, other.runtime_load_id)

    served.run(test)
    served.to_base()


def resident(served) -> dict[str, int]:
    return served.backend._engines[0].control.state().adapters


def test_loads_that_cannot_be_made_resident_change_nothing(served, tmp_path, weights, adapters) -> None:
    before = served.report()
    with pytest.raises(EngineError, match=r"has no adapter_config\.json"):
        served.backend.stage(served.fresh(tmp_path, WeightKind.LORA))
    with pytest.raises(EngineError, match=r"has no config\.json"):
        served.backend.stage(served.fresh(tmp_path))
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in adapters[0].iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[:100])
    with pytest.raises(EngineError):
        served.backend.stage(served.fresh(broken, WeightKind.LORA))
    with pytest.raises(EngineError, match="was never staged"):
        served.backend.activate("", "engine:999")
    load = served.fresh(weights[0])
    served.backend.stage(load)
    with pytest.raises(EngineError, match="not paused"):
        served.backend.activate("", load.runtime_load_id)
    served.backend.drop(load.runtime_load_id)
    after = served.report()
    assert (after.lanes, after.loads, served.backend.health()) == (before.lanes, before.loads, None)


def test_slots_are_bounded(served, adapters) -> None:
    loads = [served.fresh(adapters[number % 3], WeightKind.LORA) for number in range(9)]
    for load in loads[:8]:
        served.backend.stage(load)
    with pytest.raises(EngineError, match=r"8 adapters are resident, the most that inference\.max-loads allows"):
        served.backend.stage(loads[8])
    for load in loads[:8]:
        served.backend.drop(load.runtime_load_id)
    assert resident(served) == {}


def test_full_weights_serve_one_lane(served, weights, adapters) -> None:
    load = served.fresh(weights[0])

    async def test(handler) -> None:
        await asyncio.to_thread(served.publish, load, PauseMode.RETRACT, "mine")
        answer = await ask(handler, PROMPT, 24, lane="mine")
        assert set(answer.load_ids) == {load.runtime_load_id}
        assert_scores(answer, weights[0], PROMPT)
        with pytest.raises(Unavailable, match="the load engine:0 is not resident"):
            await ask(handler, PROMPT, lane="another")
        adapter = served.fresh(adapters[0], WeightKind.LORA)
        await asyncio.to_thread(served.backend.stage, adapter)
        await asyncio.to_thread(served.backend.pause, PauseMode.RETRACT)
        with pytest.raises(EngineError, match="cannot lie over the full weights"):
            served.backend.activate("mine", adapter.runtime_load_id)
        other = served.fresh(weights[1])
        served.backend.stage(other)
        with pytest.raises(EngineError, match="one set of full weights"):
            served.backend.activate("another", other.runtime_load_id)
        await asyncio.to_thread(served.backend.resume)
        for one in (adapter, other):
            await asyncio.to_thread(served.backend.drop, one.runtime_load_id)

    served.run(test)
    assert served.to_base() != load.runtime_load_id


def test_borrowed_engine_is_verified_and_left_alone(served, weights) -> None:
    url = served.backend.endpoints()[0]
    closed = sglang_config(served.model, endpoints=[url], options={"disable-radix-cache": True})
    backend = SGLangBackend(closed, mode=PauseMode.IN_PLACE, lora=True)
    with pytest.raises(ConfigError, match="has disable_radix_cache False, and must have True"):
        backend.start()
    backend.close()
    backend = SGLangBackend(sglang_config(served.model, endpoints=[url]), mode=PauseMode.RETRACT, lora=True)
    backend.start()
    assert backend.health() is None
    backend.restart()
    assert backend.reports()[0].paused
    backend.resume()
    backend.close()
    assert served.backend.health() is None and served.report().lanes == {}
    served.publish(served.fresh(weights[0]), PauseMode.RETRACT)  # its owner cannot know what it was left with
    served.to_base()


def test_handler_verifies_what_it_connects_to(served) -> None:
    async def nothing() -> None:
        handler = SGLangHandler(lambda: ["http://127.0.0.1:9", "http://127.0.0.1:9"])
        with pytest.raises(Unavailable):
            await handler.connect()
        with pytest.raises(Unavailable):
            request = GenerateRequest(request_id="r", prompt_ids=[1], sampling=SamplingParams())
            await anext(handler.generate(request))

    asyncio.run(nothing())
