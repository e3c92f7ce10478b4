"""Weights that are read, and a probe that is scored, in slices between the steps of requests in flight."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

import torch
from safetensors.torch import load_file, save_file

from reef.errors import EngineError
from reef.inference.local.slices import Slices, whole
from reef.runtime.interfaces import MemoryRegion, PauseMode
from tests.inference.references import (
    Answer,
    collect,
    engine,
    full_load,
    lora_load,
    make_adapter,
    make_full,
    request,
    run,
)

PROMPT = list(range(300, 340))


@pytest.fixture(scope="module")
def paths(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    return {
        "engine:1": make_adapter(tiny_model, root / "lora", seed=21),
        "engine:2": make_full(tiny_model, root / "full", seed=22),
    }


@pytest.fixture
def tested(tiny_model: Path) -> Any:
    return engine(tiny_model, max_loads=2)


def load_of(load_id: str, paths: dict[str, Path]) -> Any:
    return (lora_load if load_id == "engine:1" else full_load)(load_id, paths[load_id])


def stepping(tested: Any, slices: Slices[Any], answers: dict[str, Answer]) -> tuple[Any, int]:
    """Run one step before every slice; return the result and how many slices there were."""
    for count in itertools.count():
        collect(answers, tested.step())
        try:
            next(slices)
        except StopIteration as end:
            return end.value, count
    raise AssertionError


@pytest.mark.parametrize("load_id", ["engine:1", "engine:2"])
def test_staged_and_scored_between_steps_like_at_rest(tiny_model, tested, paths, load_id):
    alone = engine(tiny_model)
    alone.stage(load_of(load_id, paths))
    expected = run(alone, [request("a", PROMPT, max_tokens=150), request("b", PROMPT, load=load_id)])

    answers: dict[str, Answer] = {}
    tested.add(request("a", PROMPT, max_tokens=150))
    _, slices = stepping(tested, tested.stage_in_slices(load_of(load_id, paths)), answers)
    assert slices > 20
    scores, slices = stepping(tested, tested.score_in_slices(load_id, PROMPT), answers)
    assert slices >= 4 and scores == alone.score(load_id, PROMPT)
    assert answers["a"].ending is None, "the request must be in flight all the time"
    for name, answer in run(tested, [request("b", PROMPT, load=load_id)]).items():
        answers.setdefault(name, Answer()).token_ids += answer.token_ids
    assert {name: answer.token_ids for name, answer in answers.items()} == {
        name: answer.token_ids for name, answer in expected.items()
    }


def test_a_load_that_fails_halfway_leaves_nothing(tested, paths, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in paths["engine:1"].iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = load_file(broken / "adapter_model.safetensors")
    weights["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"].fill_(torch.nan)  # read last
    save_file(weights, broken / "adapter_model.safetensors")
    before = tested.report()
    for _ in range(3):  # more often than there are slots
        slices = tested.stage_in_slices(lora_load("engine:1", broken))
        for _ in range(20):
            next(slices)
        with pytest.raises(EngineError, match="down_proj of layer 1 is not finite"):
            whole(slices)
        assert tested.report() == before
    for load_id in paths:
        tested.stage(load_of(load_id, paths))
    assert set(tested.report().loads) == {"engine:0", "engine:1", "engine:2"}


@pytest.mark.parametrize("load_id", ["engine:1", "engine:2"])
def test_what_is_dropped_while_it_is_staged_never_becomes_resident(tested, paths, load_id):
    slices = tested.stage_in_slices(load_of(load_id, paths))
    next(slices)
    tested.drop(load_id)
    with pytest.raises(EngineError, match="was dropped"):
        whole(slices)
    assert set(tested.report().loads) == {"engine:0"}
    tested.stage(load_of(load_id, paths))
    assert load_id in tested.report().loads


def test_dropping_another_load_disturbs_no_staging(tested, paths):
    tested.stage(load_of("engine:2", paths))
    slices = tested.stage_in_slices(load_of("engine:1", paths))
    next(slices)
    tested.drop("engine:2")
    whole(slices)
    assert set(tested.report().loads) == {"engine:0", "engine:1"}


def test_an_adapter_never_lies_over_a_base_that_was_released(tested, paths):
    slices = tested.stage_in_slices(load_of("engine:1", paths))
    next(slices)
    tested.pause(PauseMode.RETRACT)
    tested.release_memory([MemoryRegion.WEIGHTS, MemoryRegion.KV_CACHE])
    tested.restore_memory()
    with pytest.raises(EngineError, match="memory was released"):
        whole(slices)
    assert set(tested.report().loads) == {"engine:0"}


def test_scores_of_a_load_that_is_gone_are_not_given(tested, paths):
    tested.stage(load_of("engine:1", paths))
    slices = tested.score_in_slices("engine:1", PROMPT)
    next(slices)
    tested.drop("engine:1")
    tested.stage(load_of("engine:1", paths))  # the same ID, and yet another load
    with pytest.raises(EngineError, match="dropped"):
        whole(slices)


def test_two_at_once_never_take_more_slots_than_there_are(tiny_model, paths):
    tested = engine(tiny_model, max_loads=2)
    tested.stage(lora_load("engine:9", paths["engine:1"]))
    both = [tested.stage_in_slices(load_of(load_id, paths)) for load_id in paths]
    for slices in both:
        next(slices)
    with pytest.raises(EngineError):
        for slices in both:
            whole(slices)
    assert len(tested.report().loads) <= 3


def test_a_slice_leaves_no_mode_behind(tested, paths):
    slices = tested.stage_in_slices(load_of("engine:1", paths))
    next(slices)
    assert not torch.is_inference_mode_enabled()
    whole(slices)
