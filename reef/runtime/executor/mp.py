"""Executor `mp`: each worker is a fresh Python process that serves calls from a pipe, in order, on its main thread.

    owner                                          worker process
    rpc() ──► [call id, method, arguments] ──────► receiving thread ──► main thread: runs one call at a time
    a thread per worker ◄── [call id, result] ◄──────────────────────── main thread

The owner's thread of a worker spawns the process, reads its answers, reaps it and reports its death. Closing the
owner's side of the pipe asks the worker to finish and leave. Arguments and results are pickled; the pipe is a private
socket pair between a process and its child.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import IO, Any

from reef.errors import ReefError, WorkerDied
from reef.runtime.executor.calls import CONSTRUCT, Served, attempt, die_with, resolve, tail
from reef.runtime.executor.owner import OwnedWorkers, Worker

_BOOTSTRAP = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = json.loads(sys.argv[1]); "
    "from reef.runtime.executor.mp import serve; serve(int(sys.argv[2]), int(sys.argv[3]))"
)
_TERMINATE_SECONDS = 2.0
_KILL_SECONDS = 30.0  # a busy machine takes its time even for this
_REAP_SECONDS = 5.0  # for one that has closed its pipe and lives on
_ORPHAN_SECONDS = 2.0


# ---------------------------------------------------------------------------------------------- owner side


class _Process(Worker):
    """One worker process as its owner sees it."""

    def __init__(
        self, name: str, env: Mapping[str, str], log_path: Path | None, on_death: Callable[[str], None]
    ) -> None:
        self.name = name
        self._env = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **env}
        self._log_path = log_path
        self._on_death = on_death
        self._lock = Lock()  # guards _pending and death
        self._send_lock = Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._spawned = Event()
        self._built: Future[Any] = Future()
        # The kernel sends the parent-death signal when the *thread* that spawned a child ends. So the thread that
        # lives as long as the child spawns it, never the caller's, which may be a pool's.
        self._thread = Thread(target=self._run, name=f"{name}-owner", daemon=True)

    def start(self, worker_class: str, kwargs: Mapping[str, Any]) -> Future[Any]:
        """Spawn; the future resolves when the worker is built."""
        self._thread.start()
        self._spawned.wait()
        self._built = self.call(CONSTRUCT, (worker_class,), dict(kwargs))
        return self._built

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it cannot be called back, so it cannot be cancelled
        number = next(self._numbers)
        try:
            message = pickle.dumps((number, pickle.dumps((method, args, kwargs))))
        except Exception as error:
            future.set_exception(error)
            return future
        with self._lock:
            death = self.death
            if death is None:
                self._pending[number] = future
        if death is not None:
            future.set_exception(WorkerDied(death))
            return future
        # When sending fails, the owner's thread sees the same death and fails the future with the reason.
        with suppress(OSError), self._send_lock:
            self._connection.send_bytes(message)
        return future

    @property
    def alive(self) -> bool:
        return self._spawned.is_set() and self.death is None

    def ask_to_stop(self) -> None:
        """Close our side for writing: the worker runs what it was sent before, then leaves. Never blocks.

        One that is still being built has nothing to finish, and is terminated.
        """
        with suppress(OSError):  # already gone
            self._socket.shutdown(socket.SHUT_WR)
        if not self._built.done():
            self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)  # does nothing once reaped

    def wait(self, deadline: float) -> bool:
        """Wait until the process is reaped and its futures are resolved; False if `deadline` came first."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            log = self._spawn()
        except Exception as error:
            self.death = f"{self.name} could not be spawned: {error}"
            self._spawned.set()
            return
        with log:
            offset = log.tell()
            self._spawned.set()
            self._read()
            self._bury(f"{self.name} (pid {self.pid}) {self._reap()}{tail(log, offset)}")

    def _spawn(self) -> IO[bytes]:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._connection = Connection(os.dup(self._socket.fileno()))
            arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), self.name]
            path = self._log_path
            log: IO[bytes] = tempfile.TemporaryFile() if path is None else path.open("ab+")  # noqa: SIM115
            log.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                pass_fds=[theirs.fileno()],
            )
            self.pid = self._process.pid
        return log

    def _read(self) -> None:
        """Resolve futures until the worker's side is closed."""
        while True:
            # A grandchild may hold the pipe open after the worker died, so its end is not always an end of file.
            while not self._connection.poll(1.0):
                if self._process.poll() is not None:
                    return
            try:
                number, succeeded, payload = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            with self._lock:
                future = self._pending.pop(number)
            resolve(future, self.name, succeeded, payload)

    def _reap(self) -> str:
        try:
            code = self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code >= 0:
            return f"exited with code {code}"
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"

    def _bury(self, reason: str) -> None:
        with self._lock:
            self.death = reason
            pending, self._pending = self._pending, {}
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # frees a caller that is still sending
        with self._send_lock:
            self._connection.close()
            self._socket.close()
        for future in pending.values():
            future.set_exception(WorkerDied(reason))
        self._on_death(reason)


class MpExecutor(OwnedWorkers[_Process]):
    """Workers in processes of their own, which die with this one."""

    def _make_worker(self, name: str, env: Mapping[str, str], log_path: Path | None) -> _Process:
        return _Process(name, env, log_path, self._on_death)

    def start(self) -> None:
        built = [
            worker.start(self._worker_class, kwargs) for worker, kwargs in zip(self._workers, self._kwargs, strict=True)
        ]
        if self._closing:  # `close` came too early to see these processes
            self.close(_TERMINATE_SECONDS)
        self._await_built(built, self._start_timeout, _TERMINATE_SECONDS)

    def close(self, timeout: float = 10.0) -> None:
        """Ask, wait up to `timeout` seconds, terminate, kill. Raises ReefError if a process survives even that."""
        with self._lock:
            self._closing = True
        left = [worker for worker in self._workers if worker.alive]
        for worker in left:
            worker.ask_to_stop()
        for number, seconds in ((None, timeout), (signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            deadline = time.monotonic() + seconds
            for worker in left:
                if number is not None:
                    worker.signal(number)
            left = [worker for worker in left if not worker.wait(deadline)]
        if left:
            raise ReefError(f"not gone after SIGKILL: {', '.join(f'{w.name} (pid {w.pid})' for w in left)}")


# ---------------------------------------------------------------------------------------------- worker side


def serve(fd: int, owner: int) -> None:
    """Entry point of a worker process: build the worker, then run its calls until the owner closes the pipe."""
    die_with(owner)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    calls: SimpleQueue[bytes | None] = SimpleQueue()
    Thread(target=_receive, args=(connection, calls, owner), name="receiver", daemon=True).start()
    served = Served()
    while (message := calls.get()) is not None:
        number, call = pickle.loads(message)
        connection.send_bytes(pickle.dumps((number, *attempt(served.run, call))))
    served.close()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # tearing down an interpreter with torch in it takes seconds, and native threads may hang it


def _receive(connection: Connection, calls: SimpleQueue[bytes | None], owner: int) -> None:
    """Move calls off the pipe, so that no sender waits for a call in progress. Outlives an owner by two seconds."""
    with suppress(EOFError, OSError):
        while True:
            calls.put(connection.recv_bytes())
    calls.put(None)
    while os.getppid() == owner:  # a living owner decides how long closing may take
        time.sleep(0.5)
    time.sleep(_ORPHAN_SECONDS)
    os._exit(1)
