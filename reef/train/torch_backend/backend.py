"""The PyTorch trainer behind the training contract: a worker in a process of its own, reached by an executor."""

from __future__ import annotations

from collections.abc import Callable

from reef.errors import WorkerDied
from reef.runtime.interfaces import (
    Executor,
    TrainingBackend,
    TrainJob,
    TrainResult,
    TransferSession,
    WeightKind,
)
from reef.train.torch_backend.config import TorchConfig

ATTACH_SECONDS = 30.0


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
        if self._executor is None:
            raise WorkerDied("the trainer is not started")
        try:
            result: TrainResult = self._executor.rpc(0, "train", job).result(self._config.step_timeout)
        except TimeoutError:
            # The step may still run; ending its process is the only way to be sure that nobody else trains this job.
            self._executor.close()
            raise WorkerDied(
                f"the step took longer than training.step-timeout ({self._config.step_timeout:g} s)"
            ) from None
        return result

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
