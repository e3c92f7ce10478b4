"""Pause, switch of weights under requests in flight, flush, memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

import torch

from reef.errors import EngineError
from reef.runtime.interfaces import Ending, MemoryRegion, PauseMode
from tests.inference.references import (
    Answer,
    collect,
    engine,
    far,
    full_load,
    lora_load,
    make_adapter,
    make_full,
    reference_greedy,
    reference_logprobs,
    reference_model,
    request,
    run,
)

TOLERANCE = 1e-4
PROMPT = list(range(200, 233))
BOTH = (MemoryRegion.WEIGHTS, MemoryRegion.KV_CACHE)


@pytest.fixture(scope="module")
def paths(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    return {
        "engine:1": make_adapter(tiny_model, root / "lora", seed=11),
        "engine:2": make_full(tiny_model, root / "full", seed=12),
    }


@pytest.fixture(scope="module")
def models(tiny_model: Path, paths: dict[str, Path]) -> dict[str, Any]:
    return {
        "engine:0": reference_model(tiny_model),
        "engine:1": reference_model(tiny_model, paths["engine:1"]),
        "engine:2": reference_model(paths["engine:2"]),
    }


def ready(tiny_model: Path, paths: dict[str, Path], **options: Any) -> Any:
    tested = engine(tiny_model, **options)
    tested.stage(lora_load("engine:1", paths["engine:1"]))
    tested.stage(full_load("engine:2", paths["engine:2"]))
    return tested


def start(tested: Any, steps: int, answers: dict[str, Answer], **options: Any) -> None:
    tested.add(request("a", PROMPT, lane="blue", max_tokens=30, **options))
    for _ in range(steps):
        collect(answers, tested.step())


def switch(tested: Any, mode: PauseMode, load_id: str) -> None:
    tested.pause(mode)
    tested.activate("blue", load_id)
    tested.resume()


def finish(tested: Any, answers: dict[str, Answer]) -> Answer:
    while tested.has_work():
        collect(answers, tested.step())
    return answers["a"]


@pytest.mark.parametrize("mode", list(PauseMode))
def test_paused_means_no_token(tiny_model, paths, models, mode):
    tested, answers = ready(tiny_model, paths), {}
    start(tested, 5, answers)
    tested.pause(mode)
    assert tested.step() == []
    assert not tested.has_work()
    tested.add(request("b", PROMPT))
    assert tested.step() == []
    tested.resume()
    assert finish(tested, answers).token_ids == reference_greedy(models["engine:0"], PROMPT, 30)


def test_retract_frees_every_page(tiny_model, paths):
    tested, answers = ready(tiny_model, paths), {}
    start(tested, 5, answers)
    assert tested.report().free_pages < tested.report().total_pages
    tested.pause(PauseMode.RETRACT)
    report = tested.report()
    assert (report.free_pages, report.running, report.waiting) == (report.total_pages, 0, 1)


@pytest.mark.parametrize("load_id", ["engine:1", "engine:2"])
def test_switch_under_retract_recomputes_all_before(tiny_model, paths, models, load_id):
    tested, answers = ready(tiny_model, paths), {}
    start(tested, 10, answers)
    switch(tested, PauseMode.RETRACT, load_id)
    answer = finish(tested, answers)
    assert answer.load_ids == ["engine:0"] * 10 + [load_id] * 20
    before, after = answer.token_ids[:10], answer.token_ids[10:]
    assert after == reference_greedy(models[load_id], PROMPT + before, 20)
    assert far(answer.logprobs[10:], reference_logprobs(models[load_id], PROMPT + before, after)) < TOLERANCE
    assert far(answer.logprobs[:10], reference_logprobs(models["engine:0"], PROMPT, before)) < TOLERANCE


@torch.no_grad()
def logprobs_on_frozen_cache(models: dict[str, Any], spans: list[tuple[str, int]], ids: list[int]) -> list[float]:
    """Of the output tokens when each span's model continues on the keys and values that the ones before left.

    A span's model computes the token that the span before sampled last, and samples from its logits.
    """
    cache, done, scores = None, 0, []
    for load_id, count in spans:
        end = done + count if done else len(PROMPT) + count - 1
        output = models[load_id](torch.tensor([ids[done:end]]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        table = output.logits[0].log_softmax(-1)[-count:]
        scores += [row[token].item() for row, token in zip(table, ids[end - count + 1 : end + 1], strict=True)]
        done = end
    return scores


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_switch_in_place_goes_on_with_frozen_kv(tiny_model, paths, models, kernels):
    tested, answers = ready(tiny_model, paths, kernels=kernels), {}
    start(tested, 10, answers)
    switch(tested, PauseMode.IN_PLACE, "engine:1")
    for _ in range(9):
        collect(answers, tested.step())
    switch(tested, PauseMode.IN_PLACE, "engine:2")
    answer = finish(tested, answers)
    assert answer.load_ids == ["engine:0"] * 10 + ["engine:1"] * 9 + ["engine:2"] * 11
    spans = [("engine:0", 10), ("engine:1", 9), ("engine:2", 11)]
    expected = logprobs_on_frozen_cache(models, spans, PROMPT + answer.token_ids)
    assert far(answer.logprobs, expected) < TOLERANCE
    recomputed = reference_logprobs(models["engine:2"], PROMPT + answer.token_ids[:19], answer.token_ids[19:])
    assert far(answer.logprobs[19:], recomputed) > 100 * TOLERANCE, "frozen and recomputed KV must differ here"


def test_mixed_kv_never_enters_the_prefix_cache(tiny_model, paths, models):
    tested, answers = ready(tiny_model, paths), {}
    start(tested, 10, answers)
    switch(tested, PauseMode.IN_PLACE, "engine:1")
    answer = finish(tested, answers)
    for load_id, cached in (("engine:0", 40), ("engine:1", 0)):
        # Under the old load the pages computed before the switch are good: 42 tokens had KV then.
        longer = PROMPT + answer.token_ids
        again = run(tested, [request(load_id, longer, load=load_id)])[load_id]
        assert again.cached_tokens == cached
        assert again.token_ids == reference_greedy(models[load_id], longer, 12)


def test_request_without_output_starts_again_in_place(tiny_model, paths, models):
    """A prompt half prefilled under the old load would never show in the spans."""
    tested = ready(tiny_model, paths)
    long = list(range(300, 500))
    tested.add(request("a", long, lane="blue"))
    assert tested.step() == []  # 64 of 200 tokens
    switch(tested, PauseMode.IN_PLACE, "engine:1")
    answer = run(tested)["a"]
    assert set(answer.load_ids) == {"engine:1"}
    assert answer.token_ids == reference_greedy(models["engine:1"], long, 12)
    assert far(answer.logprobs, reference_logprobs(models["engine:1"], long, answer.token_ids)) < TOLERANCE


def test_pinned_and_other_lanes_do_not_switch(tiny_model, paths, models):
    tested, answers = ready(tiny_model, paths), {}
    tested.add(request("pinned", PROMPT, lane="blue", load="engine:0"))
    tested.add(request("red", PROMPT, lane="red"))
    collect(answers, tested.step())
    switch(tested, PauseMode.IN_PLACE, "engine:1")
    finish_all = run(tested)
    for name in ("pinned", "red"):
        assert set(finish_all[name].load_ids) == {"engine:0"}


def test_flush_while_running_frees_pages_at_the_end(tiny_model, paths, models):
    tested, answers = ready(tiny_model, paths), {}
    run(tested, [request("warm", PROMPT)])
    start(tested, 3, answers)
    tested.flush()
    assert tested.report().stats["cached_pages"] == 0
    assert run(tested, [request("b", PROMPT)])["b"].cached_tokens == 0
    tested.flush()
    assert tested.report().free_pages == tested.report().total_pages


def test_release_acknowledges_what_holds_nothing_any_more(tiny_model, paths):
    tested, answers = ready(tiny_model, paths), {}
    start(tested, 5, answers)
    tested.pause(PauseMode.IN_PLACE)
    with pytest.raises(EngineError, match="no memory region optimizer"):
        tested.release_memory([MemoryRegion.OPTIMIZER])
    only = tested.release_memory([MemoryRegion.KV_CACHE])
    assert only.released == [MemoryRegion.KV_CACHE] and only.owner == "engine-0"
    assert "engine:2" in tested.report().loads and tested.report().stats["cached_pages"] == 0
    assert tested.report().running == 0 and tested.report().waiting == 1, "what ran waits"
    with pytest.raises(EngineError, match="released"):
        tested.resume()
    both = tested.release_memory(BOTH)
    assert set(both.released) == set(BOTH) and min(both.bytes_before, both.bytes_after, both.device_free) > 0
    assert tested.restore_memory().released == []
    tested.flush()
    assert tested.report().free_pages == tested.report().total_pages


@pytest.mark.parametrize("resident", [False, True])
def test_requests_complete_after_memory_came_back(tiny_model, paths, models, resident):
    tested, answers = ready(tiny_model, paths), {}
    tested.add(request("waits", PROMPT[:9]))
    start(tested, 5, answers)
    tested.pause(PauseMode.RETRACT)
    tested.release_memory([MemoryRegion.KV_CACHE] if resident else BOTH)
    tested.add(request("late", PROMPT[:7]))
    assert not tested.has_work() and tested.step() == []
    tested.restore_memory()
    assert ("engine:1" in tested.report().loads) is resident
    tested.resume()  # no lane serves what is gone
    answer = finish(tested, answers)
    assert answer.load_ids == ["engine:0"] * 30
    assert answer.token_ids == reference_greedy(models["engine:0"], PROMPT, 30)
    assert all(answers[name].ending is not None for name in ("waits", "late"))


def test_release_and_restore_memory(tiny_model, paths, models):
    tested, answers = ready(tiny_model, paths), {}
    with pytest.raises(EngineError, match="paused"):
        tested.release_memory(BOTH)
    tested.add(request("pinned", PROMPT[:9], load="engine:1"))
    start(tested, 5, answers)
    tested.pause(PauseMode.IN_PLACE)
    tested.activate("blue", "engine:2")
    tested.release_memory(BOTH)
    assert tested.report().loads == {}
    with pytest.raises(EngineError):
        tested.score("engine:0", PROMPT)
    with pytest.raises(EngineError, match="released"):
        tested.stage(full_load("engine:2", paths["engine:2"]))
    with pytest.raises(EngineError, match="released"):
        tested.resume()
    tested.restore_memory()
    with pytest.raises(EngineError, match="engine:2"):
        tested.resume()
    tested.stage(full_load("engine:2", paths["engine:2"]))
    tested.resume()
    answer = finish(tested, answers)
    assert answer.load_ids == ["engine:0"] * 5 + ["engine:2"] * 25
    assert answer.token_ids[5:] == reference_greedy(models["engine:2"], PROMPT + answer.token_ids[:5], 25)
    assert answers["pinned"].ending is Ending.ENGINE_CUT


def test_score_while_paused_changes_nothing(tiny_model, paths, models):
    tested, answers = ready(tiny_model, paths), {}
    start(tested, 5, answers)
    tested.pause(PauseMode.IN_PLACE)
    before = tested.report()
    ids = [5, *PROMPT]
    for load_id, model in models.items():
        assert far(tested.score(load_id, ids), reference_logprobs(model, ids[:1], ids[1:])) < TOLERANCE
    assert tested.report() == before
    tested.resume()
    assert finish(tested, answers).token_ids == reference_greedy(models["engine:0"], PROMPT, 30)


def test_spans_of_a_switch_are_contiguous(tiny_model, paths):
    tested, answers = ready(tiny_model, paths), {}
    start(tested, 4, answers)
    for load_id in ("engine:1", "engine:2", "engine:0"):
        switch(tested, PauseMode.IN_PLACE, load_id)
        for _ in range(4):
            collect(answers, tested.step())
    loads = finish(tested, answers).load_ids
    assert sum(1 for left, right in pairwise(loads) if left != right) == 3
