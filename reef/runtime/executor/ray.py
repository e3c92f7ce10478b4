"""Executor `ray`: each worker is an actor, which serves calls in order on the main thread of its process.

    owner                                                 actor (named, in a seat of the reservation)
    rpc() ──► run.remote([method, arguments]) ──────────► Host.run: one call at a time
    one thread per executor ◄── answers, deaths ◄──────── Ray
            └──► every second: a ping in the actor's queue, so that the death of an idle one is noticed

Actors are not detached: Ray ends them when the process that made them is gone, however it ended. Nothing is restarted
or sent twice (`max_restarts` and `max_task_retries` are 0). An actor that Ray cannot reach is killed rather than waited
for: two owners of its resources would be worse. What crosses is pickled here, so that errors are those of `mp`.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from reef.errors import ReefError, WorkerDied
from reef.runtime.executor.calls import CONSTRUCT, Served, attempt, die_with, resolve, tail
from reef.runtime.executor.owner import OwnedWorkers, Worker
from reef.runtime.executor.placement import Component, Seat, plan
from reef.runtime.executor.process import Process, identify
from reef.runtime.executor.ray_cluster import RayCluster, RayReservation, end_process

log = logging.getLogger("reef.ray")

_PING_SECONDS = 1.0
_KILL_SECONDS = 30.0  # a busy machine takes its time even for this
_NAME_SECONDS = 10.0  # until a dead actor's name is free


# ---------------------------------------------------------------------------------------------- worker side


class Host:
    """What runs in the actor. Its methods return what `attempt` returns; none raises."""

    def __init__(self, directory: str, log_path: str | None) -> None:
        die_with(os.getppid())  # Ray's own agent on this node; without this it takes two more seconds
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is for the owner
        with suppress(OSError):  # not on this node
            os.chdir(directory)
        if log_path is not None and Path(log_path).parent.is_dir():
            log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
        )
        self._served = Served()

    def where(self) -> tuple[str, Process | None]:
        """The node's id, and this process."""
        return ray.get_runtime_context().get_node_id(), identify(os.getpid())

    def ping(self) -> None:
        pass

    def run(self, call: bytes) -> tuple[bool, bytes]:
        return attempt(self._served.run, call)

    def finish(self) -> tuple[bool, bytes]:
        """Close the worker; the owner kills the process next."""
        done = attempt(lambda _: self._served.close(), b"")
        sys.stdout.flush()
        sys.stderr.flush()
        return done


# ---------------------------------------------------------------------------------------------- owner side


class _Actor(Worker):
    """One actor as its owner sees it. `_settle`, `_bury` and `ping` run on the executor's thread only."""

    def __init__(
        self,
        name: str,
        env: Mapping[str, str],
        log_path: Path | None,
        post: Callable[[Callable[[], None]], None],
        on_death: Callable[[str], None],
    ) -> None:
        self.name = name
        self._env = dict(env)
        self._log_path = log_path
        self._post = post
        self._on_death = on_death
        self._lock = Lock()  # guards _pending and death
        self._pending: set[Future[Any]] = set()
        self._handle: Any = None
        self._pinged: Future[Any] | None = None
        self._built: Future[Any] = Future()
        self._offset = 0
        self._here = ""  # the owner's node
        self.place: Future[tuple[str, Process]] = Future()  # node id and process, once it runs

    def start(
        self, reservation: RayReservation, seat: Seat, deadline: float, worker_class: str, kwargs: Mapping[str, Any]
    ) -> Future[Any]:
        """Ask Ray for the actor; the future resolves when the worker is built."""
        if self._log_path is not None and self._log_path.exists():
            self._offset = self._log_path.stat().st_size
        options = {
            **reservation.options(seat),
            "name": self.name,
            "namespace": reservation.cluster.namespace,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": self._env} if self._env else None,
        }
        log_path = None if self._log_path is None else str(self._log_path.absolute())
        self._here = ray.get_runtime_context().get_node_id()
        deadline = min(deadline, time.monotonic() + _NAME_SECONDS)
        while True:
            try:
                self._handle = ray.remote(Host).options(**options).remote(os.getcwd(), log_path)
                break
            except ValueError as error:  # the name of one that died is free a moment later
                if time.monotonic() > deadline:
                    raise WorkerDied(f"{self.name} could not start: {error}") from error
                time.sleep(0.05)
        self.place = self._submit(self._handle.where.remote, plain=True)
        self._built = self.call(CONSTRUCT, (worker_class,), dict(kwargs))
        return self._built

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        try:
            message = pickle.dumps((method, args, kwargs))
        except Exception as error:
            return _failed(error)
        if self._handle is None:
            return _failed(WorkerDied(self.death or f"{self.name} was never started"))
        return self._submit(partial(self._handle.run.remote, message))

    def ping(self) -> None:
        if self._handle is not None and self.death is None and (self._pinged is None or self._pinged.done()):
            self._pinged = self._submit(self._handle.ping.remote, plain=True)

    def finish(self) -> Future[Any] | None:
        """Ask the worker to close after what it was sent before; one that is not built has nothing to finish."""
        if self._handle is None or self.death is not None or not self._built.done():
            return None
        return self._submit(self._handle.finish.remote)

    def kill(self) -> None:
        if self._handle is not None and ray.is_initialized():
            with suppress(ray.exceptions.RayError):
                ray.kill(self._handle, no_restart=True)

    def bury(self, reason: str) -> None:
        """Fail what is pending, and everything from now on. Does nothing the second time."""
        with self._lock:
            if self.death is not None:
                return
            self.death = reason
            pending, self._pending = self._pending, set()
        for future in pending:
            future.set_exception(WorkerDied(reason))
        self._on_death(reason)

    def confirm(self, seconds: float) -> bool:
        """After `kill`: wait until the process is gone; False if that is not certain within about `seconds`."""
        if self._handle is None:
            return True
        try:
            node, which = self.place.result(seconds)
        except WorkerDied:
            return True  # it died before it said where it was: Ray has confirmed that
        except TimeoutError:
            return False
        return end_process(node, which, seconds, here=node == self._here)

    @property
    def pid(self) -> int | None:  # type: ignore[override]
        return self.place.result()[1].pid if self.place.done() and self.place.exception() is None else None

    def _submit(self, send: Callable[[], Any], *, plain: bool = False) -> Future[Any]:
        """Send, and have the answer posted to the executor's thread; `plain` answers are no `attempt`."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it cannot be called back, so it cannot be cancelled
        with self._lock:
            if self.death is not None:
                future.set_exception(WorkerDied(self.death))
                return future
            self._pending.add(future)
            try:
                sent = send().future()
            except Exception as error:  # the connection was closed before the executor was
                self._pending.discard(future)
                future.set_exception(ReefError(f"{self.name}: {type(error).__name__}: {error}"))
                return future
        # Called on a thread of Ray's that must not wait for anything.
        sent.add_done_callback(lambda done: self._post(partial(self._settle, future, done, plain)))
        return future

    def _settle(self, future: Future[Any], done: Future[Any], plain: bool) -> None:
        error = done.exception()
        if isinstance(error, RayActorError):
            if isinstance(error, ActorUnavailableError):
                self.kill()
            self.bury(self._describe(error))
            return
        with self._lock:
            if future not in self._pending:
                return  # buried meanwhile
            self._pending.discard(future)
        if error is not None:
            future.set_exception(ReefError(f"{self.name}: {type(error).__name__}: {error}"))
            return
        if plain:
            future.set_result(done.result())
        else:
            resolve(future, self.name, *done.result())

    def _describe(self, error: RayActorError) -> str:
        """One line of what Ray tells in ten, and what the worker wrote last."""
        text = " ".join(str(error).split())
        for mark in ("Worker exit detail: ", "The actor is dead because "):
            if mark in text:
                text = text.rpartition(mark)[2]
                break
        where = f"{self.name} (pid {self.pid})" if self.pid is not None else self.name
        last = ""
        if self._log_path is not None and self._log_path.exists():
            with self._log_path.open("rb") as file:
                last = tail(file, self._offset)
        return f"{where} died: {text.partition(' Some common causes')[0].rstrip('.')}{last}"


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class RayExecutor(OwnedWorkers[_Actor]):
    """Workers as Ray actors, which die with this process."""

    def __init__(self, *args: Any, reservation: RayReservation | None = None, **options: Any) -> None:
        """`reservation` must have seats for a component called `name`, and stays open.

        Without one the executor makes its own on a local Ray, and stops both when it is closed.
        """
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        super().__init__(*args, **options)
        self._reservation = reservation
        self._cluster: RayCluster | None = None  # of our own
        self._namespace = ""
        self._thread = Thread(target=self._run, name=f"{self._name}-owner", daemon=True)

    def _make_worker(self, name: str, env: Mapping[str, str], log_path: Path | None) -> _Actor:
        return _Actor(name, env, log_path, self._events.put, self._on_death)

    def start(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        if self._reservation is None:
            self._cluster = RayCluster(num_cpus=max(1, self.world_size))
            self._cluster.open()
            component = Component(name=self._name, workers=self.world_size)
            self._reservation = RayReservation(self._cluster, plan([component]))
        seats = self._reservation.seats(self._name)
        self._namespace = self._reservation.cluster.namespace
        with self._lock:
            if self._closing:
                raise WorkerDied(f"{self._name}-0 was closed before it started")
            self._thread.start()
        built = [
            actor.start(self._reservation, seat, deadline, self._worker_class, kwargs)
            for actor, seat, kwargs in zip(self._workers, seats, self._kwargs, strict=True)
        ]
        if self._closing:  # `close` came too early to see these actors
            self.close(0.0)
        self._await_built(built, max(0.0, deadline - time.monotonic()), 0.0)

    def close(self, timeout: float = 10.0) -> None:
        """Ask, wait up to `timeout` seconds, kill, and confirm that every process is gone before anything else may
        have its resources. Raises ReefError if that is not certain within seconds. Not to be called by a listener.
        """
        with self._lock:
            self._closing = True
        finishing = [future for actor in self._workers if (future := actor.finish()) is not None]
        wait(finishing, timeout)
        for actor in self._workers:
            actor.kill()
        deadline = time.monotonic() + _KILL_SECONDS
        uncertain = [a.name for a in self._workers if not a.confirm(max(0.1, deadline - time.monotonic()))]
        for actor in self._workers:
            actor.bury(f"{actor.name} was closed")
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(_KILL_SECONDS)
        if self._cluster is not None:
            assert self._reservation is not None
            self._reservation.close()
            self._cluster.close()
            self._cluster = None
        if uncertain:
            raise ReefError(f"not known to be gone after they were killed: {', '.join(uncertain)}")

    def _run(self) -> None:
        """Resolve futures and notice deaths, until `close`."""
        next_ping = time.monotonic() + _PING_SECONDS
        while True:
            try:
                event = self._events.get(timeout=max(0.0, next_ping - time.monotonic()))
                if event is None:
                    return
                self._handle(event)
            except Empty:
                next_ping = time.monotonic() + _PING_SECONDS
                self._ping()

    def _handle(self, event: Callable[[], None]) -> None:
        try:
            event()
        except Exception:  # a listener's; without this thread no future would ever be resolved
            log.exception("%s: a listener failed", self._name)

    def _ping(self) -> None:
        assert self._reservation is not None
        lost = self._reservation.cluster.lost(self._namespace)
        for actor in self._workers:
            if lost is not None:
                actor.bury(f"{actor.name} was given up: {lost}")
            else:
                actor.ping()
