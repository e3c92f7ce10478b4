from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from reef.errors import TrainingError
from reef.runtime.executor.mp import MpExecutor
from reef.runtime.executor.uni import UniExecutor
from reef.runtime.interfaces import MemoryRegion, Objective, WeightKind
from reef.train.torch_backend.backend import TorchBackend
from reef.train.torch_backend.config import TorchConfig
from tests.train.batches import job, rollouts, tensors

WORKER = "reef.train.torch_backend.worker:TorchWorker"
CONFIG = TorchConfig(dtype="float32", threads=1)


@pytest.fixture(params=[UniExecutor, MpExecutor], ids=["uni", "mp"])
def backend(request, tiny_model):
    arguments = [{"model_path": str(tiny_model), "config": CONFIG}]
    backend = TorchBackend(CONFIG, lambda: request.param(WORKER, arguments, name="trainer"))
    backend.start()
    yield backend
    backend.close()


def test_training_through_an_executor(backend, tmp_path):
    first = backend.train(job(tmp_path / "first", rollouts()))
    second = backend.train(job(tmp_path / "second", rollouts(seed=1), after=first))
    assert second.metrics["optimizer_steps"] == 2
    assert tensors(first).keys() == tensors(second).keys()
    assert tensors(first) != tensors(second)
    assert backend.health() is None


def test_a_trainer_may_be_started_again(backend, tmp_path):
    first = backend.train(job(tmp_path / "first", rollouts()))
    backend.close()
    assert backend.health() is not None
    backend.start()
    assert backend.health() is None
    again = backend.train(job(tmp_path / "again", rollouts()))
    assert tensors(again) == tensors(first), "the same step from the same seed"


def test_a_training_error_comes_back_as_itself(backend, tmp_path):
    with pytest.raises(TrainingError, match="did you mean 'clip_low'"):
        backend.train(job(tmp_path / "a", rollouts(), objective=Objective("policy_gradient", {"clip_lo": 0.1})))
    backend.train(job(tmp_path / "b", rollouts()))


def test_memory_is_given_back_and_taken_between_steps(backend, tmp_path):
    first = backend.train(job(tmp_path / "first", rollouts()))
    released, again = backend.release_memory(), backend.release_memory()
    assert set(released.released) == {MemoryRegion.WEIGHTS, MemoryRegion.OPTIMIZER} == set(again.released)
    assert released.owner == "trainer" and released.bytes_before > 0 and released.device_free > 0
    restored = backend.restore_memory()
    assert restored.released == []
    second = backend.train(job(tmp_path / "second", rollouts(seed=1), after=first))
    other = backend.train(job(tmp_path / "other", rollouts(seed=1), after=first))
    assert second.metrics["optimizer_steps"] == 2 and tensors(second) == tensors(other)


def test_what_a_backend_says_of_itself():
    lora, full = (
        TorchBackend(config, lambda: UniExecutor(WORKER, [{}])) for config in (CONFIG, TorchConfig(mode="full"))
    )
    assert (lora.weight_kind, full.weight_kind) == (WeightKind.LORA, WeightKind.FULL)
    assert lora.immutable_candidates
    assert lora.accepted_transfers == ("disk",)
