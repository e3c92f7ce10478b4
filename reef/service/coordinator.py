"""A coordinator outside the service: hosted by an executor that the service owns, or running by itself.

::

    executor_training, ray_training    service ──owns──► executor ──► CoordinatorHost ──owns──► engines, trainer
    coordinator_training               service ──finds─► `reef coordinator` ──────────owns──► engines, trainer

Either way the service asks before each operation where the coordinator is now, and tells one that it has not met the
committed heads before anything else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import msgspec

from reef.errors import ConfigError, Unavailable, WorkerDied
from reef.inference.local.address import node_address
from reef.runtime.coordinator import Coordinator
from reef.runtime.interfaces import Executor
from reef.runtime.recovery import Supervisor, Watched
from reef.runtime.remote import (
    CoordinatorServer,
    Discovery,
    RemoteChannel,
    publish_discovery,
)
from reef.service.config import ReefConfig
from reef.service.plan import build_plan, lay_foundation

log = logging.getLogger("reef.service")

COORDINATOR = "coordinator"
HOST = "reef.service.coordinator:CoordinatorHost"
EVERYWHERE = ("0.0.0.0", "::")
ANSWER_SECONDS = 10.0


class CoordinatorHost:
    """Runs one coordinator, with all that it owns, and serves it; an executor builds it where it is to run."""

    def __init__(self, config: ReefConfig) -> None:
        execution = config.execution
        foundation = lay_foundation(config)
        self._closing = ExitStack()
        with ExitStack() as opened:
            coordinator = Coordinator(build_plan(config, foundation))
            opened.callback(coordinator.close)
            coordinator.start()
            host, port = execution.coordinator_host, execution.coordinator_port
            shown = node_address() if host in EVERYWHERE else host
            try:
                self._server = CoordinatorServer(coordinator, host, port, shown)
            except OSError as error:
                where = f"{host}:{port}: {error.strerror}"
                raise ConfigError(f"execution.coordinator-host, coordinator-port: cannot listen on {where}") from error
            opened.callback(self._server.close)
            self._server.start()
            self._closing = opened.pop_all()

    def discovery(self) -> Discovery:
        return self._server.discovery

    def close(self) -> None:
        self._closing.close()


# ---------------------------------------------------------------------------------------------- hosted by an executor


class HostedChannel(RemoteChannel):
    """Owns the executor in which the coordinator runs, and replaces both when they die, within a budget."""

    def __init__(self, make: Callable[[], Executor], open_resources: Callable[[ExitStack], None]) -> None:
        super().__init__(self._where)
        self._make = make
        self._open_resources = open_resources
        self._opened = ExitStack()
        self._executor: Executor | None = None
        self._found: Discovery | None = None
        self._supervisor = Supervisor(Watched(COORDINATOR, self._trouble, self._replace))

    async def start(self) -> None:
        await asyncio.to_thread(self._start)
        self._supervisor.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._close)
        await super().close()

    def _start(self) -> None:
        with ExitStack() as opened:
            self._open_resources(opened)
            opened.callback(self._stop)
            self._launch()
            self._opened = opened.pop_all()

    def _close(self) -> None:
        self._supervisor.close()
        self._opened.close()

    def _launch(self) -> None:
        executor = self._executor = self._make()  # first: `_stop` may be called meanwhile
        executor.start()
        executor.on_failure(lambda reason: self._supervisor.nudge())
        self._found = executor.rpc(0, "discovery").result(ANSWER_SECONDS)

    def _stop(self) -> None:
        self._found = None
        if self._executor is not None:
            self._executor.close()
            self._executor = None  # only now: what is not known to be gone is still ours

    def _trouble(self) -> str | None:
        return "it is not started" if self._executor is None else self._executor.health()

    def _replace(self) -> bool:
        self._stop()
        self._launch()
        return True

    async def _where(self) -> Discovery:
        stopped = self._supervisor.stopped.get(COORDINATOR)
        if reason := stopped or self._supervisor.repairing.get(COORDINATOR):
            raise Unavailable(reason)
        found = self._found
        if found is None or (reason := self._trouble()):
            self._supervisor.nudge()
            raise WorkerDied(reason or "the coordinator is not started")
        return found


# ---------------------------------------------------------------------------------------------- running by itself


def discovery_path(config: ReefConfig) -> Path:
    """The name under which a coordinator and its service find each other."""
    return Path(config.execution.coordinator or Path(config.reef.data_dir) / "coordinator.json")


def run_coordinator(config: ReefConfig) -> None:
    """Be a coordinator until SIGINT or SIGTERM: start engines and trainer, say where it is, serve one service."""
    done = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    path = discovery_path(config)
    execution = msgspec.structs.replace(config.execution, runtime="coordinator_training")
    host = CoordinatorHost(msgspec.structs.replace(config, execution=execution))
    try:
        found = host.discovery()
        publish_discovery(path, found)
        print(f"reef: coordinator {os.getpid()} ready at {found.host}:{found.port}, named in {path}", file=sys.stderr)
        done.wait()
    finally:
        path.unlink(missing_ok=True)
        host.close()
