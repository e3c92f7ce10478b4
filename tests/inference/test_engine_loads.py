"""Adapters and full weights: against PEFT and transformers, side by side, staged, activated, refused and dropped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

import torch
from safetensors.torch import load_file, save_file

from reef.errors import EngineError
from reef.runtime.interfaces import Ending, PauseMode, WeightKind, WeightLoad
from tests.inference.references import (
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
PROMPT = list(range(100, 145))


@pytest.fixture(scope="module")
def weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories by runtime load ID."""
    root = tmp_path_factory.mktemp("weights")
    return {
        "engine:1": make_adapter(tiny_model, root / "all", seed=1),
        "engine:2": make_adapter(tiny_model, root / "rslora", seed=2, r=16, use_rslora=True),
        "engine:3": make_adapter(tiny_model, root / "attention", seed=3, targets=("q_proj", "v_proj"), r=2),
        "engine:4": make_adapter(tiny_model, root / "mlp", seed=4, targets=("up_proj",), layers_to_transform=[1]),
        "engine:5": make_full(tiny_model, root / "full", seed=5),
        "engine:6": make_full(tiny_model, root / "sharded", seed=6, max_shard_size="4MB"),
    }


@pytest.fixture(scope="module")
def models(tiny_model: Path, weights: dict[str, Path]) -> dict[str, Any]:
    adapters = {load: reference_model(tiny_model, weights[load]) for load in list(weights)[:4]}
    full = {load: reference_model(weights[load]) for load in list(weights)[4:]}
    return {"engine:0": reference_model(tiny_model), **adapters, **full}


def load_of(load_id: str, weights: dict[str, Path]) -> WeightLoad:
    return (full_load if load_id in ("engine:5", "engine:6") else lora_load)(load_id, weights[load_id])


def staged(tiny_model: Path, weights: dict[str, Path], **options: Any) -> Any:
    tested = engine(tiny_model, **options)
    for load_id in weights:
        tested.stage(load_of(load_id, weights))
    return tested


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_all_loads_in_one_batch(tiny_model, weights, models, kernels):
    assert len(list(weights["engine:6"].glob("model-*.safetensors"))) > 1
    tested = staged(tiny_model, weights, kernels=kernels)
    answers = run(tested, [request(load_id, PROMPT, load=load_id) for load_id in models])
    outputs = set()
    for load_id, model in models.items():
        answer = answers[load_id]
        assert answer.token_ids == reference_greedy(model, PROMPT, 12)
        assert far(answer.logprobs, reference_logprobs(model, PROMPT, answer.token_ids)) < TOLERANCE
        assert set(answer.load_ids) == {load_id}
        assert answer.cached_tokens == 0  # the same prompt, but other weights
        outputs.add(tuple(answer.token_ids))
        scores = tested.score(load_id, PROMPT)
        assert far(scores, reference_logprobs(model, PROMPT[:1], PROMPT[1:])) < TOLERANCE
    assert len(outputs) == len(models)


def test_prefix_hits_stay_within_a_load(tiny_model, weights):
    tested = staged(tiny_model, weights)
    first = run(tested, [request(load_id, PROMPT, load=load_id) for load_id in weights])
    again = run(tested, [request(load_id, PROMPT, load=load_id) for load_id in weights])
    for load_id in weights:
        assert again[load_id].cached_tokens == 40
        assert again[load_id].token_ids == first[load_id].token_ids


def test_lanes_follow_activation(tiny_model, weights, models):
    tested = staged(tiny_model, weights)
    with pytest.raises(EngineError, match="paused"):
        tested.activate("blue", "engine:1")
    tested.pause(PauseMode.RETRACT)
    tested.activate("blue", "engine:1")
    tested.activate("red", "engine:5")
    with pytest.raises(EngineError, match="not resident"):
        tested.activate("red", "engine:99")
    with pytest.raises(EngineError, match="base lane"):
        tested.activate("", "engine:1")
    tested.resume()
    answers = run(tested, [request(lane or "base", PROMPT, lane=lane) for lane in ("", "blue", "red", "green")])
    served = {name: answer.load_ids[0] for name, answer in answers.items()}
    assert served == {"base": "engine:0", "blue": "engine:1", "red": "engine:5", "green": "engine:0"}
    assert answers["blue"].token_ids == reference_greedy(models["engine:1"], PROMPT, 12)
    assert tested.report().lanes == {"": "engine:0", "blue": "engine:1", "red": "engine:5"}
    tested.pause(PauseMode.RETRACT)
    tested.activate("blue", "engine:0")
    tested.resume()
    assert run(tested, [request("a", PROMPT, lane="blue")])["a"].token_ids == answers["base"].token_ids


def test_the_base_under_another_id(tiny_model):
    tested = engine(tiny_model)
    tested.stage(WeightLoad(runtime_load_id="engine:8", content_id="base", kind=WeightKind.FULL, path=None))
    answers = run(tested, [request("a", PROMPT), request("b", PROMPT, load="engine:8")])
    assert answers["a"].token_ids == answers["b"].token_ids
    assert (answers["b"].cached_tokens, answers["b"].load_ids[0]) == (0, "engine:8")


def test_staging_again_is_harmless_unless_the_content_differs(tiny_model, weights):
    tested = engine(tiny_model)
    tested.stage(lora_load("engine:1", weights["engine:1"]))
    tested.stage(lora_load("engine:1", weights["engine:1"]))
    other = WeightLoad(runtime_load_id="engine:1", content_id="other", kind=WeightKind.LORA, path="nowhere")
    with pytest.raises(EngineError, match="is resident with content"):
        tested.stage(other)


def test_max_loads_is_a_bound(tiny_model, weights):
    tested = engine(tiny_model, max_loads=2)
    for load_id in ("engine:1", "engine:2"):
        tested.stage(lora_load(load_id, weights[load_id]))
    with pytest.raises(EngineError, match=r"max-loads \(2\)"):
        tested.stage(lora_load("engine:3", weights["engine:3"]))
    tested.drop("engine:1")
    tested.stage(lora_load("engine:3", weights["engine:3"]))
    assert set(tested.report().loads) == {"engine:0", "engine:2", "engine:3"}


def test_drop(tiny_model, weights):
    tested = staged(tiny_model, weights)
    tested.add(request("pinned", PROMPT, load="engine:1", max_tokens=50))
    tested.add(request("other", PROMPT, load="engine:2"))
    tested.step()
    tested.pause(PauseMode.IN_PLACE)
    tested.activate("blue", "engine:2")
    with pytest.raises(EngineError, match="serves lane 'blue'"):
        tested.drop("engine:2")
    with pytest.raises(EngineError, match="serves lane ''"):
        tested.drop("engine:0")
    tested.drop("engine:1")
    tested.drop("engine:1")
    tested.resume()
    answers = run(tested)
    assert answers["pinned"].ending is Ending.ENGINE_CUT
    assert "engine:1" in (answers["pinned"].error or "")
    assert answers["other"].ending is Ending.LENGTH
    tested.flush()
    assert tested.report().free_pages == tested.report().total_pages


def test_the_same_bytes_under_another_id_are_read_once_and_share_a_slot_but_no_cache(tiny_model, weights, tmp_path):
    tested = engine(tiny_model, max_loads=2)
    for load_id in ("engine:1", "engine:5"):
        tested.stage(load_of(load_id, weights))
    first = run(tested, [request("a", PROMPT, load="engine:1"), request("b", PROMPT, load="engine:5")])
    for alias, load_id in (("engine:11", "engine:1"), ("engine:15", "engine:5")):
        load = load_of(load_id, {load_id: tmp_path / "is not there"})
        tested.stage(WeightLoad(runtime_load_id=alias, content_id=load.content_id, kind=load.kind, path=load.path))
    tested.drop("engine:1")
    again = run(tested, [request("a", PROMPT, load="engine:11"), request("b", PROMPT, load="engine:15")])
    for name, answer in again.items():
        assert answer.token_ids == first[name].token_ids and answer.cached_tokens == 0
    with pytest.raises(EngineError, match=r"max-loads \(2\)"):
        tested.stage(load_of("engine:2", weights))
    tested.drop("engine:11")
    tested.stage(load_of("engine:2", weights))


def test_what_a_request_decodes_with_is_not_evicted(tiny_model, weights):
    tested = staged(tiny_model, weights)
    tested.add(request("pinned", PROMPT, load="engine:1"))
    tested.step()
    assert tested.evict("engine:1") is False and "engine:1" in tested.report().loads
    assert run(tested)["pinned"].ending is Ending.LENGTH
    assert tested.evict("engine:1") is True and "engine:1" not in tested.report().loads


def test_what_cannot_be_freed_is_reported_as_leaked(tiny_model, weights, monkeypatch):
    tested = staged(tiny_model, weights)
    with monkeypatch.context() as broken:
        broken.setattr(tested._loads, "drop", lambda load_id: 1 / 0)
        with pytest.raises(EngineError, match="could not be freed: division by zero"):
            tested.drop("engine:1")
    assert tested.report().leaked == {"engine:1": "ZeroDivisionError: division by zero"}
    assert "engine:1" in tested.report().loads
    tested.drop("engine:1")
    assert not tested.report().leaked and "engine:1" not in tested.report().loads


def corrupt_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**config, **changes}))


def corrupt_weights(directory: Path, name: str, change: Any) -> None:
    tensors = load_file(directory / name)
    change(tensors)
    save_file(tensors, directory / name, metadata={"format": "pt"})


ADAPTER, FULL = "adapter_model.safetensors", "model.safetensors"
LORA_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FULL_KEY = "model.layers.1.mlp.up_proj.weight"

REFUSALS = [
    ("engine:1", lambda d: corrupt_config(d, use_dora=True), "use_dora"),
    ("engine:1", lambda d: corrupt_config(d, bias="all"), "bias"),
    ("engine:1", lambda d: corrupt_config(d, peft_type="IA3"), "peft_type"),
    ("engine:1", lambda d: corrupt_config(d, alpha_pattern={"q_proj": 3}), "alpha_pattern"),
    ("engine:1", lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json"),
    ("engine:1", lambda d: (d / ADAPTER).unlink(), ADAPTER),
    ("engine:1", lambda d: (d / ADAPTER).write_bytes(b"garbage" * 9), ADAPTER),
    ("engine:1", lambda d: corrupt_weights(d, ADAPTER, lambda t: t[LORA_KEY].fill_(torch.nan)), "not finite"),
    ("engine:1", lambda d: corrupt_weights(d, ADAPTER, lambda t: t.pop(LORA_KEY)), "lora_A"),
    ("engine:1", lambda d: corrupt_weights(d, ADAPTER, lambda t: t.update(lm_head=torch.ones(2))), "lm_head"),
    ("engine:1", lambda d: corrupt_weights(d, ADAPTER, lambda t: t.update({LORA_KEY: torch.ones(4, 63)})), "q_proj"),
    ("engine:1", lambda d: corrupt_weights(d, ADAPTER, lambda t: t.clear()), "no weights"),
    ("engine:5", lambda d: corrupt_weights(d, FULL, lambda t: t[FULL_KEY].fill_(torch.inf)), "not finite"),
    ("engine:5", lambda d: corrupt_weights(d, FULL, lambda t: t.pop(FULL_KEY)), FULL_KEY),
    ("engine:5", lambda d: corrupt_weights(d, FULL, lambda t: t.update({FULL_KEY: torch.ones(3, 3)})), FULL_KEY),
    ("engine:5", lambda d: corrupt_weights(d, FULL, lambda t: t.update(surplus=torch.ones(3))), "surplus"),
    ("engine:6", lambda d: next(d.glob("model-00002*")).unlink(), "weights"),
]


@pytest.mark.parametrize(("load_id", "corrupt", "message"), REFUSALS)
def test_what_cannot_be_served_is_refused_and_changes_nothing(shared, weights, tmp_path, load_id, corrupt, message):
    directory = tmp_path / "copy"
    shutil.copytree(weights[load_id], directory)
    corrupt(directory)
    before = shared.report()
    load = load_of(load_id, {**weights, load_id: directory})
    with pytest.raises(EngineError, match=message):
        shared.stage(load)
    assert shared.report() == before


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Any:
    return engine(tiny_model)


def test_another_architecture_is_refused(shared, weights, tmp_path):
    directory = tmp_path / "copy"
    shutil.copytree(weights["engine:5"], directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    with pytest.raises(EngineError, match="another architecture"):
        shared.stage(full_load("engine:5", directory))
