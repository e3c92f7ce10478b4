from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from peft import PeftModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from reef.errors import StorageError, TrainingError  # noqa: E402
from reef.runtime.interfaces import Objective  # noqa: E402
from reef.train.torch_backend.config import TorchConfig  # noqa: E402
from reef.train.torch_backend.worker import TorchWorker  # noqa: E402
from tests.train.batches import PROBE, content, job, rollouts, tensors  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")  # peft, of transformers
MODES = pytest.mark.parametrize("mode", ["lora", "full"])


def make(tiny_model, mode="lora", **config) -> TorchWorker:
    return TorchWorker(
        str(tiny_model), TorchConfig(mode=mode, **{"dtype": "float32", "learning_rate": 1e-2, "threads": 1} | config)
    )


def served_logprobs(model) -> list[float]:
    ids = torch.tensor([PROBE])
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
    return table.gather(1, ids[0, 1:, None]).squeeze(1).tolist()


def test_an_adapter_loads_in_peft_and_gives_the_probe(tiny_model, tmp_path):
    result = make(tiny_model).train(job(tmp_path / "a", rollouts()))
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert served_logprobs(base) == pytest.approx(result.incumbent_probe_logprobs, abs=1e-4)
    model = PeftModel.from_pretrained(base, result.weights_path)
    assert served_logprobs(model) == pytest.approx(result.probe_logprobs, abs=1e-4)
    moved = max(abs(a - b) for a, b in zip(result.probe_logprobs, result.incumbent_probe_logprobs, strict=True))
    assert moved > 1e-2


def test_full_weights_load_in_transformers_and_give_the_probe(tiny_model, tmp_path):
    result = make(tiny_model, "full").train(job(tmp_path / "a", rollouts()))
    model = AutoModelForCausalLM.from_pretrained(result.weights_path)
    assert model.dtype == torch.float32
    assert served_logprobs(model) == pytest.approx(result.probe_logprobs, abs=1e-4)
    names = {name for name, _ in model.named_parameters()}
    files = {file.name for file in (tmp_path / "a" / "weights").glob("*.safetensors")}
    assert files == {f"model.{name}.safetensors" for name in names}
    assert (tmp_path / "a" / "weights" / "tokenizer.json").exists()


def test_the_adapter_s_configuration_names_no_path(tiny_model, tmp_path):
    result = make(tiny_model, lora_rank=4, lora_alpha=8.0).train(job(tmp_path / "a", rollouts()))
    written = json.loads(content(result.weights_path)["adapter_config.json"])
    assert (written["r"], written["lora_alpha"], written["base_model_name_or_path"]) == (4, 8.0, None)
    assert str(tiny_model) not in json.dumps(written)


@MODES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_job_gives_the_same_bytes(tiny_model, tmp_path, mode, dtype):
    results = [
        make(tiny_model, mode, dtype=dtype, threads=2).train(job(tmp_path / name, rollouts(), job_id="j"))
        for name in "ab"
    ]
    assert content(results[0].weights_path) == content(results[1].weights_path)
    assert content(results[0].state_path) == content(results[1].state_path)


@MODES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restarted_worker_continues_as_if_it_had_not_stopped(tiny_model, tmp_path, mode, dtype):
    worker = make(tiny_model, mode, dtype=dtype)
    first = worker.train(job(tmp_path / "first", rollouts()))
    second = worker.train(job(tmp_path / "second", rollouts(seed=1), after=first))
    again = make(tiny_model, mode, dtype=dtype).train(job(tmp_path / "again", rollouts(seed=1), after=first))
    assert tensors(again) == tensors(second)
    assert again.metrics["optimizer_steps"] == 2


@MODES
def test_rejecting_a_candidate_costs_nothing(tiny_model, tmp_path, mode):
    worker = make(tiny_model, mode)
    incumbent = worker.train(job(tmp_path / "incumbent", rollouts()))
    before = content(incumbent.weights_path), content(incumbent.state_path)
    rejected = worker.train(job(tmp_path / "rejected", rollouts(seed=1), after=incumbent))
    shutil.rmtree(tmp_path / "rejected")
    accepted = worker.train(job(tmp_path / "accepted", rollouts(seed=2), after=incumbent))
    assert (content(incumbent.weights_path), content(incumbent.state_path)) == before
    clean = make(tiny_model, mode).train(job(tmp_path / "clean", rollouts(seed=2), after=incumbent))
    assert tensors(accepted) == tensors(clean)
    assert accepted.incumbent_probe_logprobs == incumbent.probe_logprobs != rejected.probe_logprobs


@MODES
def test_back_to_the_base_after_training(tiny_model, tmp_path, mode):
    worker = make(tiny_model, mode)
    first = worker.train(job(tmp_path / "first", rollouts()))
    again = worker.train(job(tmp_path / "again", rollouts()))
    assert tensors(again) == tensors(first)


@MODES
def test_the_last_candidate_is_not_loaded_again_wherever_it_was_moved(tiny_model, tmp_path, monkeypatch, mode):
    worker = make(tiny_model, mode)
    first = worker.train(job(tmp_path / "first", rollouts()))
    shutil.copytree(tmp_path / "first", tmp_path / "store")
    shutil.rmtree(tmp_path / "first")
    stored = replace(first, weights_path=f"{tmp_path}/store/weights", state_path=f"{tmp_path}/store/state")
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_weights", lambda path: pytest.fail(f"loaded {path}"))
        second = worker.train(job(tmp_path / "second", rollouts(seed=1), after=stored))
    again = worker.train(job(tmp_path / "again", rollouts(seed=1), after=stored))
    assert tensors(again) == tensors(second)


def test_weights_of_unknown_origin_are_loaded(tiny_model, tmp_path, monkeypatch):
    worker = make(tiny_model)
    first = worker.train(job(tmp_path / "first", rollouts()))
    (tmp_path / "first" / "weights" / "reef.json").unlink()
    second = worker.train(job(tmp_path / "second", rollouts(seed=1), after=first))
    clean = make(tiny_model).train(job(tmp_path / "second", rollouts(seed=1), after=first))
    assert tensors(second) == tensors(clean)


@MODES
def test_micro_batches_add_up_to_the_whole(tiny_model, tmp_path, mode):
    whole = make(tiny_model, mode).train(job(tmp_path / "whole", rollouts()))
    parts = make(tiny_model, mode, micro_batch_tokens=30).train(job(tmp_path / "parts", rollouts()))
    assert whole.metrics["micro_batches"] == 1
    assert parts.metrics["micro_batches"] > 2
    for name in ("loss", "grad_norm", "entropy", "kl", "mismatch_mean"):
        assert parts.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-4), name


def test_metrics_of_a_step_on_policy(tiny_model, tmp_path):
    worker, samples = make(tiny_model), rollouts()
    for sample in samples:
        scored = worker._policy.score(sample.prompt_ids + sample.output_ids)
        sample.logprobs = scored[len(sample.prompt_ids) - 1 :]
    metrics = worker.train(job(tmp_path / "a", samples)).metrics
    assert metrics["mismatch_max"] < 1e-4
    assert metrics["mismatch_mean"] <= metrics["mismatch_max"]
    assert metrics["ratio_min"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert 0.0 < metrics["entropy"] < math.log(49152)
    assert metrics["trained_tokens"] == sum(len(sample.output_ids) for sample in samples)
    assert metrics["processed_tokens"] < metrics["unshared_tokens"]
    assert metrics["learning_rate"] == 1e-2
    assert metrics["tokens_per_second"] == pytest.approx(metrics["trained_tokens"] / metrics["seconds"])


@MODES
def test_kl_to_the_base_is_zero_at_the_base_and_grows(tiny_model, tmp_path, mode):
    worker, objective = make(tiny_model, mode), Objective("policy_gradient", {"kl_coefficient": 0.1})
    first = worker.train(job(tmp_path / "first", rollouts(), objective=objective))
    second = worker.train(job(tmp_path / "second", rollouts(), after=first, objective=objective))
    assert first.metrics["kl_base"] == pytest.approx(0.0, abs=1e-6)
    assert second.metrics["kl_base"] > 1e-4


def test_masked_tokens_do_not_train(tiny_model, tmp_path):
    short, masked = rollouts(), rollouts()
    for sample in short:
        sample.output_ids, sample.logprobs = sample.output_ids[:3], sample.logprobs[:3]
        sample.advantages = sample.advantages[:3]
    for sample in masked:
        sample.mask = [True] * 3 + [False] * (len(sample.output_ids) - 3)
    results = [make(tiny_model).train(job(tmp_path / name, s)) for name, s in (("s", short), ("m", masked))]
    assert tensors(results[0]) == tensors(results[1])


def test_the_gradient_is_clipped(tiny_model, tmp_path):
    free = make(tiny_model, max_grad_norm=1e9, eps=1e6).train(job(tmp_path / "free", rollouts()))
    bound = make(tiny_model, max_grad_norm=1e-3, eps=1e6).train(job(tmp_path / "bound", rollouts()))
    assert free.metrics["grad_norm"] == bound.metrics["grad_norm"] > 1e-3
    # with so large an eps the first step is proportional to the gradient
    averages = [
        torch.cat([v.flatten() for k, v in _state(r).items() if k.startswith("exp_avg.")]) for r in (free, bound)
    ]
    assert averages[1].norm().item() == pytest.approx(1e-3 * (1 - 0.9), rel=1e-3)
    assert torch.nn.functional.cosine_similarity(*averages, dim=0).item() == pytest.approx(1.0, abs=1e-5)


def _state(result) -> dict:
    return load_file(f"{result.state_path}/optimizer.safetensors")


def test_adamw_s_first_step_by_hand(tiny_model, tmp_path):
    worker = make(tiny_model, weight_decay=0.1, max_grad_norm=1e9)
    before = {name: master.detach().clone() for name, master in worker._policy.masters.items()}
    averages = _state(worker.train(job(tmp_path / "a", rollouts())))
    for name, master in worker._policy.masters.items():
        gradient = averages[f"exp_avg.{name}"] / (1 - 0.9)
        expected = before[name] * (1 - 1e-2 * 0.1) - 1e-2 * gradient / (gradient.abs() + 1e-8)
        assert torch.allclose(master, expected, atol=1e-6), name


BAD_BATCHES = {
    "no token to train": lambda samples: samples.clear(),
    "no token": lambda samples: [setattr(s, "mask", [False] * len(s.output_ids)) for s in samples],
    "record r0-0: logprobs has 1 entries for": lambda samples: setattr(samples[0], "logprobs", [0.0]),
    "record r0-1: advantages has a value that is not finite": lambda samples: setattr(
        samples[1], "advantages", [math.nan] * len(samples[1].output_ids)
    ),
    "record r0-0: prompt_ids is empty": lambda samples: setattr(samples[0], "prompt_ids", []),
    r"record r0-0: token ids must be in \[0, 49152\)": lambda samples: setattr(samples[0], "prompt_ids", [49152]),
    "record r0-0: 5005 tokens": lambda samples: setattr(samples[0], "prompt_ids", [1] * 5000),
    "the loss is": lambda samples: setattr(samples[0], "logprobs", [-1e9] * len(samples[0].output_ids)),
}


def test_bad_batches_write_nothing_and_move_nothing(tiny_model, tmp_path):
    worker = make(tiny_model)
    for message, spoil in BAD_BATCHES.items():
        samples = rollouts()
        spoil(samples)
        with pytest.raises(TrainingError, match=message):
            worker.train(job(tmp_path / "bad", samples))
        assert not (tmp_path / "bad").exists()
    after = worker.train(job(tmp_path / "after", rollouts()))
    clean = make(tiny_model).train(job(tmp_path / "clean", rollouts()))
    assert tensors(after) == tensors(clean)


def test_an_infinite_gradient_writes_nothing(tiny_model, tmp_path):
    worker = make(tiny_model)
    name = next(name for name in worker._policy.masters if "lora_B" in name)
    worker._policy.masters[name].register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingError, match="gradient's norm is"):
        worker.train(job(tmp_path / "bad", rollouts()))
    assert not (tmp_path / "bad").exists()


def test_an_unknown_objective_is_a_training_error(tiny_model, tmp_path):
    with pytest.raises(TrainingError, match="unknown objective 'nope'"):
        make(tiny_model).train(job(tmp_path / "a", rollouts(), objective=Objective("nope")))


def test_an_incumbent_of_another_shape_is_refused(tiny_model, tmp_path):
    first = make(tiny_model, lora_rank=4).train(job(tmp_path / "first", rollouts()))
    with pytest.raises(TrainingError, match="incumbent adapter has r 4, training has 8"):
        make(tiny_model, lora_rank=8).train(job(tmp_path / "second", rollouts(), after=first))


def test_a_state_of_other_weights_is_refused(tiny_model, tmp_path):
    worker = make(tiny_model, "full", dtype="bfloat16")
    first = worker.train(job(tmp_path / "first", rollouts()))
    second = worker.train(job(tmp_path / "second", rollouts(seed=1), after=first))
    with pytest.raises(TrainingError, match="optimizer state is not of these weights"):
        worker.train(job(tmp_path / "x", rollouts(), after=replace(second, state_path=first.state_path)))


def test_a_failed_write_leaves_nothing_and_is_recovered_from(tiny_model, tmp_path, monkeypatch):
    worker = make(tiny_model)

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(worker._optimizer, "write", fail)
        with pytest.raises(StorageError, match="no space"):
            worker.train(job(tmp_path / "bad", rollouts()))
    assert content(tmp_path / "bad") == {}
    after = worker.train(job(tmp_path / "after", rollouts()))
    clean = make(tiny_model).train(job(tmp_path / "clean", rollouts()))
    assert tensors(after) == tensors(clean)


def test_an_interrupted_attempt_is_overwritten(tiny_model, tmp_path):
    worker = make(tiny_model)
    (tmp_path / "a" / "weights").mkdir(parents=True)
    (tmp_path / "a" / "weights" / "rest").write_text("half")
    result = worker.train(job(tmp_path / "a", rollouts()))
    assert "rest" not in content(result.weights_path)


@MODES
def test_a_released_trainer_continues_as_if_it_had_kept_everything(tiny_model, tmp_path, mode):
    kept, released = make(tiny_model, mode), make(tiny_model, mode)
    first, same = kept.train(job(tmp_path / "a", rollouts())), released.train(job(tmp_path / "b", rollouts()))
    released.release_memory()
    assert not any(isinstance(value, torch.nn.Module) for value in vars(released).values())
    released.restore_memory()
    second = kept.train(job(tmp_path / "c", rollouts(seed=1), after=first))
    resumed = released.train(job(tmp_path / "d", rollouts(seed=1), after=same))
    assert tensors(second) == tensors(resumed)
    released.release_memory()
    released.restore_memory()
    assert tensors(released.train(job(tmp_path / "e", rollouts()))) == tensors(first), "from the base again"


def test_a_step_without_the_device_is_refused(tiny_model, tmp_path):
    worker = make(tiny_model)
    worker.release_memory()
    with pytest.raises(AssertionError, match="without the device"):
        worker.train(job(tmp_path / "a", rollouts()))
