"""The PyTorch trainer behind the training contract: a worker in a process of its own, reached by an executor."""

from __future__ import annotations

from reef.runtime.interfaces import Executor, TrainingBackend, TrainJob, TrainResult, WeightKind
from reef.train.torch_backend.config import TorchConfig


class TorchBackend(TrainingBackend):
    """Sends each job to the executor's only worker, a `TorchWorker` made with the same configuration."""

    def __init__(self, config: TorchConfig, executor: Executor) -> None:
        self._config = config
        self._executor = executor

    def start(self) -> None:
        self._executor.start()

    def train(self, job: TrainJob) -> TrainResult:
        result: TrainResult = self._executor.rpc(0, "train", job).result()
        return result

    def health(self) -> str | None:
        return self._executor.health()

    def close(self) -> None:
        self._executor.close()

    @property
    def weight_kind(self) -> WeightKind:
        return WeightKind(self._config.mode)

    @property
    def immutable_candidates(self) -> bool:
        """A step reads its incumbent from disk and writes a new directory."""
        return True
