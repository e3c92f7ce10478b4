"""What executors have in common: named workers, one deadline for their start, and the news that one has died."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from reef.errors import ReefError, WorkerDied
from reef.runtime.interfaces import Executor


class Worker(ABC):
    """One worker as its owner sees it."""

    name: str
    death: str | None = None  # why it is gone
    pid: int | None = None  # of its own process, where that is known

    @abstractmethod
    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]: ...


W = TypeVar("W", bound=Worker)


class OwnedWorkers(Executor, Generic[W]):
    """Workers made by `_make_worker`, called `<name>-<rank>`; see `make_executor` for the arguments."""

    def __init__(
        self,
        worker_class: str,
        kwargs_per_rank: Sequence[Mapping[str, Any]],
        *,
        name: str = "worker",
        env_per_rank: Sequence[Mapping[str, str]] | None = None,
        log_directory: Path | None = None,
        start_timeout: float = 600.0,
    ) -> None:
        self._worker_class = worker_class
        self._kwargs = kwargs_per_rank
        self._name = name
        self._start_timeout = start_timeout
        self._lock = Lock()  # guards _failure, _listeners and _closing
        self._failure: str | None = None
        self._listeners: list[Callable[[str], None]] = []
        self._closing = False
        if log_directory is not None:
            log_directory.mkdir(parents=True, exist_ok=True)
        self._workers: list[W] = []
        for rank, env in enumerate(env_per_rank or [{}] * len(kwargs_per_rank)):
            its_name = f"{name}-{rank}"
            log_path = None if log_directory is None else log_directory / f"{its_name}.log"
            self._workers.append(self._make_worker(its_name, env, log_path))

    @abstractmethod
    def _make_worker(self, name: str, env: Mapping[str, str], log_path: Path | None) -> W:
        """Allocates nothing yet."""

    @property
    def world_size(self) -> int:
        return len(self._kwargs)

    @property
    def pids(self) -> list[int]:
        """Ids of the workers' own processes, on whatever nodes, in order of rank; without those that are not known."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def rpc(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._workers[rank].call(method, args, kwargs)

    def health(self) -> str | None:
        return next((worker.death for worker in self._workers if worker.death is not None), None)

    def on_failure(self, listener: Callable[[str], None]) -> None:
        with self._lock:
            failure = self._failure
            if failure is None:
                self._listeners.append(listener)
        if failure is not None:
            listener(failure)

    def _on_death(self, reason: str) -> None:
        with self._lock:
            if self._closing or self._failure is not None:
                return
            self._failure = reason
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(reason)

    def _await_built(self, built: Sequence[Future[Any]], seconds: float, patience: float) -> None:
        """Wait for every constructor; what cannot start is closed with this `patience`. Raises WorkerDied."""
        wait_until_started(built, [worker.name for worker in self._workers], seconds, partial(self.close, patience))


def wait_until_started(
    built: Sequence[Future[Any]], names: Sequence[str], timeout: float, give_up: Callable[[], None]
) -> None:
    """Wait for every constructor under one deadline; on the first failure call `give_up` and raise WorkerDied."""
    done, pending = wait(built, timeout, return_when=FIRST_EXCEPTION)
    failed = [(name, future.exception()) for name, future in zip(names, built, strict=True) if future in done]
    name, error = next(((name, error) for name, error in failed if error is not None), ("", None))
    if error is None and not pending:
        return
    late = ", ".join(name for name, future in zip(names, built, strict=True) if future in pending)
    if isinstance(error, WorkerDied):
        reason = str(error)
    elif error is not None:
        reason = f"{name} could not start: {type(error).__name__}: {error}"
    else:
        reason = f"{late} could not start: not ready within {timeout:g} s"
    try:
        give_up()
    except ReefError as second:  # it must not hide the first
        raise WorkerDied(f"{reason}; then: {second}") from error
    raise WorkerDied(reason) from error
