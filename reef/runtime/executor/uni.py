"""Executor `uni`: workers live in this process, each on one thread of its own."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from reef.errors import ReefError, WorkerDied
from reef.runtime.interfaces import Executor


def load_class(path: str) -> Callable[..., Any]:
    """Import "package.module:Class"."""
    module, _, name = path.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return loaded


class _ThreadWorker:
    """A worker and the one thread that builds it and runs every call to it, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = Lock()
        self._open = True
        self._worker: Any = None
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def build(self, worker_class: str, kwargs: Mapping[str, Any]) -> Future[Any]:
        def construct() -> None:
            self._worker = load_class(worker_class)(**kwargs)

        return self._submit(construct)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        return self._submit(lambda: getattr(self._worker, method)(*args, **kwargs))

    def ask_to_stop(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._calls.put(None)

    def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; True if the thread has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._open:
                self._calls.put((future, call))
                return future
        future.set_exception(WorkerDied(f"{self.name} was closed"))
        return future

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            _resolve(*item)
        if (close := getattr(self._worker, "close", None)) is not None:
            close()


def _resolve(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)


class UniExecutor(Executor):
    """In-process workers. They cannot die on their own, nor be killed: `close` reports one that will not stop."""

    def __init__(
        self,
        worker_class: str,
        kwargs_per_rank: Sequence[Mapping[str, Any]],
        *,
        name: str = "worker",
        start_timeout: float = 600.0,
    ) -> None:
        self._workers: list[_ThreadWorker] = []
        self._worker_class = worker_class
        self._kwargs = kwargs_per_rank
        self._name = name
        self._start_timeout = start_timeout

    def start(self) -> None:
        self._workers = [_ThreadWorker(f"{self._name}-{rank}") for rank in range(self.world_size)]
        built = [
            worker.build(self._worker_class, kwargs) for worker, kwargs in zip(self._workers, self._kwargs, strict=True)
        ]
        wait_until_started(built, [w.name for w in self._workers], self._start_timeout, partial(self.close, 2.0))

    @property
    def world_size(self) -> int:
        return len(self._kwargs)

    def rpc(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._workers[rank].call(method, args, kwargs)

    def health(self) -> str | None:
        return None

    def on_failure(self, listener: Callable[[str], None]) -> None:
        pass

    def close(self, timeout: float = 10.0) -> None:
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.ask_to_stop()
        stuck = [w.name for w in self._workers if not w.join(max(0.0, deadline - time.monotonic()))]
        if stuck:
            raise ReefError(f"still busy after {timeout:g} s, and a thread cannot be killed: {', '.join(stuck)}")


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
