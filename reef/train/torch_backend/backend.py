"""The PyTorch trainer behind the training contract: a worker in a process of its own, reached by an executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reef.errors import WorkerDied
from reef.runtime.interfaces import (
    Executor,
    MemoryReport,
    TrainingBackend,
    TrainJob,
    TrainResult,
    TransferSession,
    WeightKind,
)
from reef.train.torch_backend.config import TorchConfig

ATTACH_SECONDS = 30.0
RELEASE_SECONDS = 120.0
"""A trainer that has not given the device back by then is ended: requests wait for it."""


class TorchBackend(TrainingBackend):
    """Sends each job to the executor's only worker, a `TorchWorker` made with the same configuration.

    An executor is good for one start; a trainer that is started again gets another.
    """

    def __init__(self, config: TorchConfig, make_executor: Callable[[], Executor]) -> None:
        self._config = config
        self._make_executor = make_executor
        self._executor: Executor | None = None

    def start(self) -> None:
        executor = self._executor = self._make_executor()  # first: `close` may be called meanwhile
        executor.start()

    def train(self, job: TrainJob) -> TrainResult:
        result: TrainResult = self._call(self._config.step_timeout, "train", job)
        return result

    def release_memory(self) -> MemoryReport:
        report: MemoryReport = self._call(RELEASE_SECONDS, "release_memory")
        return report

    def restore_memory(self) -> MemoryReport:
        report: MemoryReport = self._call(self._config.step_timeout, "restore_memory")
        return report

    def _call(self, timeout: float, method: str, *args: TrainJob) -> Any:
        if self._executor is None:
            raise WorkerDied("the trainer is not started")
        try:
            return self._executor.rpc(0, method, *args).result(timeout)
        except TimeoutError:
            # The step may still run; ending its process is the only way to be sure that nobody else trains this job.
            self._executor.close()
            what = f"the step took longer than training.step-timeout ({timeout:g} s)"
            raise WorkerDied(what if method == "train" else f"{method} took longer than {timeout:g} s") from None

    def attach(self, session: TransferSession) -> None:
        if self._executor is None:
            raise WorkerDied("the trainer is not started")
        try:
            self._executor.rpc(0, "attach", session).result(ATTACH_SECONDS)
        except TimeoutError:
            raise WorkerDied(f"the trainer did not answer within {ATTACH_SECONDS:g} s") from None

    def health(self) -> str | None:
        return "the trainer is not started" if self._executor is None else self._executor.health()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None  # only now: whoever did not end is still ours

    @property
    def weight_kind(self) -> WeightKind:
        return WeightKind(self._config.mode)

    @property
    def immutable_candidates(self) -> bool:
        """A step reads its incumbent from disk and writes a new directory."""
        return True
