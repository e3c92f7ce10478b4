"""Executor `uni`: workers live in this process, each on one thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from reef.errors import ReefError, WorkerDied
from reef.named import load
from reef.runtime.executor.owner import OwnedWorkers, Worker


class _ThreadWorker(Worker):
    """A worker and the one thread that builds it and runs every call to it, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = Lock()
        self._open = False  # from `build` to `ask_to_stop`
        self._worker: Any = None
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def build(self, worker_class: str, kwargs: Mapping[str, Any]) -> Future[Any]:
        def construct() -> None:
            self._worker = load(worker_class)(**kwargs)

        self._open = True
        self._thread.start()
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
        if self._thread.ident is not None:
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


class UniExecutor(OwnedWorkers[_ThreadWorker]):
    """In-process workers. They cannot die on their own, nor be killed: `close` reports one that will not stop.

    They share this process's environment and its output.
    """

    def _make_worker(self, name: str, env: Mapping[str, str], log_path: Path | None) -> _ThreadWorker:
        return _ThreadWorker(name)

    def start(self) -> None:
        built = [
            worker.build(self._worker_class, kwargs) for worker, kwargs in zip(self._workers, self._kwargs, strict=True)
        ]
        self._await_built(built, self._start_timeout, 2.0)

    def close(self, timeout: float = 10.0) -> None:
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.ask_to_stop()
        stuck = [w.name for w in self._workers if not w.join(max(0.0, deadline - time.monotonic()))]
        if stuck:
            raise ReefError(f"still busy after {timeout:g} s, and a thread cannot be killed: {', '.join(stuck)}")
