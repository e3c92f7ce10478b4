"""The worker's side of the local engines: lifecycle and weights, as collective calls on an executor."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from threading import Lock
from typing import Any

from reef.directories import OwnedDirectory
from reef.errors import BarrierError, EngineError, EngineUncertain, ReefError, WorkerDied
from reef.inference.local.address import Address
from reef.inference.local.config import LocalConfig
from reef.inference.local.pulse import Pulse
from reef.runtime.interfaces import (
    EngineReport,
    Executor,
    InferenceBackend,
    MemoryRegion,
    MemoryReport,
    PauseMode,
    TransferSession,
    WeightLoad,
)

WORKER = "reef.inference.local.worker:EngineWorker"

ExecutorFactory = Callable[[str, Sequence[Mapping[str, Any]]], Executor]
"""(worker class path, constructor arguments per rank) -> an executor that is not started."""

# Trainer and engine run the same model through different kernels. In float32 they were seen to differ by 1e-5 nat; in
# bfloat16 by up to 0.5 nat on the probe's most improbable tokens. What was not applied at all is found exactly.
_PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0, "float16": 0.1}
_RESTART_CLOSE_SECONDS = 2.0
_GRACE_SECONDS = 10.0
_LOOK_SECONDS = 0.5


class LocalBackend(InferenceBackend):
    """Controls `config.engines` engines; each serves its data plane at one of `endpoints()`.

    Every call is sent to all engines at once and answered within `config.control_timeout` seconds, or it raises:
    WorkerDied if a process is gone, EngineUncertain if an engine did not answer, gave no sign of life for
    `config.health_timeout` seconds or no longer knows its state, or if `stage` or `activate` was done by some engines
    only and could not be undone, else EngineError. Whatever fails a `pause` or `flush` is a BarrierError; whatever
    fails a memory call, unless the process is gone, is EngineUncertain.
    """

    def __init__(
        self,
        config: LocalConfig,
        make_executor: ExecutorFactory,
        *,
        base_content_id: str = "",
        host: str = "",
        close_timeout: float = 10.0,
    ) -> None:
        """`host` is where the data planes listen: "" is Unix sockets on this machine, else an address over TCP."""
        self._config = config
        self._host = host
        self._make_executor = make_executor
        self._base_content_id = base_content_id
        self._close_timeout = close_timeout
        self._names = [f"engine-{rank}" for rank in range(config.engines)]
        self._directory: OwnedDirectory | None = None  # of Unix sockets; exists from start to close
        self._endpoints: list[str] = []
        self._executor: Executor | None = None
        self._dtype: str | None = None
        self._lock = Lock()  # guards the three below
        self._pulses: list[Pulse] = []  # from the end of a start to the next
        self._answers: list[Future[Any]] = []  # of the latest question after health
        self._asked_at = 0.0

    def start(self) -> None:
        if not self._host:
            self._directory = OwnedDirectory("reef-engines-")
        self._launch(paused=False)

    def endpoints(self) -> list[str]:
        return self._endpoints

    def attach(self, session: TransferSession) -> None:
        self._all("attach", session)

    def pause(self, mode: PauseMode) -> None:
        self._barrier("pause", mode)

    def resume(self) -> None:
        self._all("resume")

    def flush(self) -> None:
        self._barrier("flush")

    def stage(self, load: WeightLoad) -> None:
        # Engines that did not stage it drop nothing.
        self._all_or_none("stage", load, undo=lambda: self.drop(load.runtime_load_id))

    def activate(self, lane: str, runtime_load_id: str) -> None:
        self._all_or_none("activate", lane, runtime_load_id)

    def drop(self, runtime_load_id: str) -> None:
        self._all("drop", runtime_load_id)

    def evict(self, runtime_load_id: str) -> bool:
        return all(self._all("evict", runtime_load_id))

    def score(self, runtime_load_id: str, token_ids: list[int]) -> list[list[float]]:
        return self._all("score", runtime_load_id, token_ids)

    def reports(self) -> list[EngineReport]:
        return self._all("report")

    def release_memory(self, regions: Collection[MemoryRegion]) -> list[MemoryReport]:
        return self._memory("release_memory", frozenset(regions))

    def restore_memory(self) -> list[MemoryReport]:
        return self._memory("restore_memory")

    def restart(self) -> None:
        self._stop(_RESTART_CLOSE_SECONDS)
        self._launch(paused=True)

    def health(self) -> str | None:
        """Never blocks: it reads the answers to the questions asked by the call before, and asks again."""
        executor = self._executor
        if executor is None:
            return "the engines are not started"
        if reason := executor.health():
            return reason
        for rank, name in enumerate(self._names):
            if reason := self._lifeless(rank):
                return f"{name}: {reason}"
        with self._lock:
            answers = self._answers
            if not all(answer.done() for answer in answers):
                silent = time.monotonic() - self._asked_at
                late = silent > self._config.control_timeout + _GRACE_SECONDS
                return f"no answer from the engines for {silent:.0f} s" if late else None
            self._answers, self._asked_at = executor.collective_rpc("health"), time.monotonic()
        for name, answer in zip(self._names, answers, strict=False):
            if trouble := answer.exception() or answer.result():
                return f"{name}: {trouble}"
        return None

    def close(self) -> None:
        try:
            self._stop(self._close_timeout)
        finally:
            self._endpoints = []
            if self._directory is not None:
                self._directory.remove()
                self._directory = None

    @property
    def max_loads(self) -> int:
        return self._config.max_loads

    @property
    def probe_tolerance(self) -> float:
        if self._dtype is None:
            raise EngineError("the engines were never started")
        return _PROBE_TOLERANCE[self._dtype]

    def _launch(self, *, paused: bool) -> None:
        shared = {"config": self._config, "base_content_id": self._base_content_id, "paused": paused}
        arguments = [{**shared, "name": name, "listen": self._listen(name)} for name in self._names]
        self._executor = executor = self._make_executor(WORKER, arguments)  # first: `close` may be called meanwhile
        try:
            executor.start()
            self._endpoints = [
                future.result(self._config.control_timeout) for future in executor.collective_rpc("endpoint")
            ]
            with self._lock:
                self._pulses = [Pulse(endpoint) for endpoint in self._endpoints]
            self._dtype = self._all("dtype")[0]
        except BaseException:
            self._stop(_RESTART_CLOSE_SECONDS)
            raise

    def _listen(self, name: str) -> str:
        if self._directory is not None:
            return str(self._directory.path / name)
        return str(Address(token=secrets.token_urlsafe(24), host=self._host))

    def _stop(self, timeout: float) -> None:
        with self._lock:
            for pulse in self._pulses:
                pulse.close()
            self._answers, self._pulses = [], []
        if self._executor is not None:
            self._executor.close(timeout)
            self._executor = None  # only now: what is not known to be gone is still ours

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call every engine; return what each returned or raised, in order of rank."""
        executor = self._executor
        if executor is None:
            raise EngineError(f"{method}: the engines are not started")
        deadline = time.monotonic() + self._config.control_timeout
        futures = executor.collective_rpc(method, *args)
        return [self._outcome(rank, future, deadline) for rank, future in enumerate(futures)]

    def _outcome(self, rank: int, future: Future[Any], deadline: float) -> Any:
        """What the engine returned or raised, or EngineUncertain."""
        while not wait([future], max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))).done:
            if reason := self._lifeless(rank):
                return EngineUncertain(reason)
            if time.monotonic() > deadline:
                return EngineUncertain(f"no answer within {self._config.control_timeout:g} s")
        return future.exception() or future.result()

    def _lifeless(self, rank: int) -> str | None:
        """Why the engine's process is taken for frozen; None while it gives signs of life."""
        with self._lock:
            silence = self._pulses[rank].silence() if self._pulses else 0.0
        return f"no sign of life for {silence:.0f} s" if silence > self._config.health_timeout else None

    def _all(self, method: str, *args: Any) -> list[Any]:
        """For calls that are harmless when only some engines did them, because asking again is."""
        outcomes = self._call(method, *args)
        if error := _failure(method, self._names, outcomes):
            raise error
        return outcomes

    def _all_or_none(self, method: str, *args: Any, undo: Callable[[], None] | None = None) -> None:
        outcomes = self._call(method, *args)
        error = _failure(method, self._names, outcomes)
        if error is None:
            return
        if type(error) is EngineError and not all(isinstance(outcome, Exception) for outcome in outcomes):
            if undo is None:
                raise EngineUncertain(f"{error}; other engines did it") from error
            try:
                undo()
            except ReefError as second:
                raise EngineUncertain(f"{error}; undoing it on the others failed: {second}") from error
        raise error

    def _memory(self, method: str, *args: Any) -> list[MemoryReport]:
        """Whoever fails this cannot say what it still holds, even if it did nothing."""
        try:
            return self._all(method, *args)
        except EngineError as error:
            raise EngineUncertain(str(error)) from error

    def _barrier(self, method: str, *args: Any) -> None:
        try:
            self._all(method, *args)
        except ReefError as error:
            raise BarrierError(str(error)) from error


def _failure(method: str, names: Sequence[str], outcomes: Sequence[Any]) -> ReefError | None:
    """One error for all that failed, of the gravest class; None if none did."""
    failures = [
        (name, outcome) for name, outcome in zip(names, outcomes, strict=True) if isinstance(outcome, Exception)
    ]
    if not failures:
        return None
    found = (
        kind for kind in (WorkerDied, EngineUncertain) if any(isinstance(failure, kind) for _, failure in failures)
    )
    worst: type[ReefError] = next(found, EngineError)
    error = worst(f"{method} failed on " + "; ".join(f"{name}: {_text(failure)}" for name, failure in failures))
    error.__cause__ = next((failure for _, failure in failures if isinstance(failure, worst)), failures[0][1])
    return error


def _text(failure: Exception) -> str:
    return str(failure) if isinstance(failure, ReefError) else f"{type(failure).__name__}: {failure}"
