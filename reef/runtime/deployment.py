"""The service's side of a deployment: the pair of runtimes over one coordinator, and how a pair is found by name.

::

    TrainingRuntime  = CoordinatorRuntime ──┐
                                            ├──► Channel ──► Coordinator (here, or in another process or node)
    InferenceRuntime = EngineRuntime ───────┘        status: where the engines are, and whether they serve
         └── InferenceHandler ─── data plane ──► engines
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import Any, cast

from reef.errors import ReefError, Unavailable, WorkerDied
from reef.metrics import PAUSE_SECONDS, RESTARTS
from reef.named import call, load_callable
from reef.runtime.coordinator import Coordinator
from reef.runtime.interfaces import (
    Candidate,
    CoordinatorStatus,
    EngineReport,
    InferenceHandler,
    InferenceRuntime,
    Marker,
    Release,
    Storage,
    TrainingRuntime,
    TrainJob,
)

log = logging.getLogger("reef.deployment")

ENTRY_POINTS = "reef.runtimes"
POLL_SECONDS = 0.5
STEP_POLL_SECONDS = 10.0
REPORT_SECONDS = 5.0

Factory = Callable[..., tuple[TrainingRuntime, InferenceRuntime]]
"""(configuration of the deployment, what it shares with the service) -> the pair, not started."""


class Channel(ABC):
    """How the service reaches its coordinator. Nothing that was sent is sent again by itself."""

    @abstractmethod
    async def start(self) -> None:
        """Start the coordinator, or find it. Raises what failed."""

    @abstractmethod
    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the coordinator's. Raises what it raised, or WorkerDied if it is gone or replaced."""

    @abstractmethod
    async def refresh(self) -> CoordinatorStatus:
        """Ask for the status. Raises ReefError with the reason while there is no coordinator."""

    @abstractmethod
    async def close(self) -> None: ...


class LocalChannel(Channel):
    """The coordinator lives in this process; its blocking methods run on threads."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="coordinator")

    async def start(self) -> None:
        await self.call("start")

    async def call(self, method: str, *args: Any) -> Any:
        function = getattr(self._coordinator, method)
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def refresh(self) -> CoordinatorStatus:
        return self._coordinator.status()

    async def close(self) -> None:
        await asyncio.to_thread(self._coordinator.close)
        self._threads.shutdown(wait=False, cancel_futures=True)


class EngineRuntime(InferenceRuntime):
    """Follows the engines wherever the coordinator's status says they are."""

    def __init__(
        self, channel: Channel, make_handler: Callable[[Callable[[], Sequence[str]]], InferenceHandler]
    ) -> None:
        self._channel = channel
        self._handler = make_handler(self.endpoints)
        self._status: CoordinatorStatus | None = None
        self._trouble: str | None = "the engines are not started"
        self._connected: tuple[str, int] | None = None  # incarnation and generation
        self._connecting = asyncio.Lock()
        self._reports: asyncio.Task[list[EngineReport]] | None = None  # shared by all who ask meanwhile

    @property
    def handler(self) -> InferenceHandler:
        return self._handler

    @property
    def status(self) -> CoordinatorStatus | None:
        """As of the last time that it was asked for."""
        return self._status

    def endpoints(self) -> Sequence[str]:
        return self._status.endpoints if self._status is not None else []

    async def follow(self) -> CoordinatorStatus:
        """Ask where the engines are, and connect if they are others than before. Raises ReefError."""
        try:
            status = await self._channel.refresh()
        except ReefError as error:
            self._trouble = str(error)
            raise
        before, self._status = self._status, status
        if before is not None:
            _count(before, status)
        await self._connect((status.incarnation, status.generation))
        self._trouble = None
        return status

    async def _connect(self, engines: tuple[str, int]) -> None:
        async with self._connecting:
            if self._connected == engines:
                return
            try:
                await (self._handler.connect() if self._connected is None else self._handler.reconnect())
            except ReefError as error:
                self._trouble = f"the engines cannot be reached: {error}"
                raise
            self._connected = engines

    def health(self) -> str | None:
        return self._trouble or (self._status.engines if self._status is not None else None)

    async def reports(self) -> list[EngineReport]:
        if self._reports is None or self._reports.done():
            self._reports = asyncio.create_task(self._channel.call("reports"))
        try:
            return await asyncio.wait_for(asyncio.shield(self._reports), REPORT_SECONDS)
        except (ReefError, TimeoutError):
            return []

    @property
    def pause_phases(self) -> dict[str, float]:
        return self._status.pause_phases if self._status is not None else {}

    @property
    def memory(self) -> dict[str, Any] | None:
        status = self._status
        return None if status is None or not status.memory else {"step_seconds": status.step_seconds, **status.memory}

    @property
    def residency(self) -> dict[str, Any]:
        return self._status.residency if self._status is not None else {}

    async def close(self) -> None:
        await self._handler.close()


def _count(before: CoordinatorStatus, now: CoordinatorStatus) -> None:
    """What happened between two looks at the coordinator."""
    another = now.incarnation != before.incarnation
    if another:
        RESTARTS.labels("coordinator").inc()
    for component, number in now.restarts.items():
        RESTARTS.labels(component).inc(max(0, number - (0 if another else before.restarts.get(component, 0))))
    if now.pause_phases and (another or now.pause_phases != before.pause_phases):
        PAUSE_SECONDS.observe(sum(now.pause_phases.values()))


class CoordinatorRuntime(TrainingRuntime):
    """Drives a coordinator through a channel. When it finds another one there, that one is told the heads first."""

    def __init__(self, channel: Channel, inference: EngineRuntime) -> None:
        self._channel = channel
        self._inference = inference
        self._storage: Storage | None = None
        self._recovered: str | None = None  # incarnation that knows the heads
        self._recovering = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        await self._channel.start()
        await self._inference.follow()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._channel.close()

    async def recover(self, storage: Storage) -> Candidate | None:
        self._storage = storage
        async with self._recovering:
            candidate = await self._recover(await self._inference.follow())
        self._watch = asyncio.create_task(self._follow(), name="follow coordinator")
        return candidate

    async def _recover(self, status: CoordinatorStatus) -> Candidate | None:
        assert self._storage is not None
        heads = [state.head for state in await self._storage.scenarios()]
        marker: Marker | None = await self._channel.call("marker")
        commit = await self._storage.commit_by_job(marker.job_id) if marker is not None else None
        committed = commit is not None and commit.release is not None
        candidate: Candidate | None = await self._channel.call("recover", heads, committed)
        self._recovered = status.incarnation
        await self._inference.follow()
        if commit is not None and commit.release is not None and marker is not None and marker.candidate is not None:
            await self.commit_candidate(marker.candidate, commit.release)
        return candidate

    async def _follow(self) -> None:
        """Keep up with the coordinator and its engines while nobody calls."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self._settle()
            except ReefError as error:  # it is the service's health meanwhile
                log.debug("the coordinator cannot be followed: %s", error)
            except Exception:  # a bug must not end this
                log.exception("the coordinator cannot be followed")

    async def _settle(self) -> None:
        """Where the coordinator is another than before, it gets the heads before anything else."""
        status = await self._inference.follow()
        if self._recovered is None or status.incarnation == self._recovered:
            return
        async with self._recovering:
            if status.incarnation != self._recovered:
                log.warning("another coordinator answers (%s): it gets the committed heads", status.incarnation)
                await self._recover(status)

    async def _call(self, method: str, *args: Any) -> Any:
        await self._settle()
        try:
            result = await self._channel.call(method, *args)
        except ReefError:
            with contextlib.suppress(ReefError):  # engines replaced on the way to the failure
                await self._inference.follow()
            raise
        await self._inference.follow()
        return result

    # ------------------------------------------------------------------ contract

    async def train(self, job: TrainJob, runtime_load_id: str) -> Candidate:
        begun = False
        while True:
            try:
                candidate: Candidate | None = await self._call("train", job, runtime_load_id, STEP_POLL_SECONDS)
            except Unavailable as error:
                if begun:  # the job may be more than a wish there: it is asked for again, not forgotten
                    raise WorkerDied(f"the coordinator was lost in the middle of a step: {error}") from error
                raise
            if candidate is not None:
                return candidate
            begun = True

    async def adopt(self, candidate: Candidate) -> Candidate:
        found: Candidate = await self._call("adopt", candidate)
        return found

    async def publish(self, candidate: Candidate) -> None:
        await self._call("publish", candidate)

    async def acknowledge(self, job_id: str, release: Release) -> None:
        await self._call("acknowledge", job_id, release)

    async def reject(self, job_id: str, reason: str) -> None:
        await self._call("reject", job_id, reason)

    async def remember(self, release: Release) -> None:
        await self._channel.call("remember", release)

    async def marker(self) -> Marker | None:
        found: Marker | None = await self._channel.call("marker")
        return found

    def health(self) -> str | None:
        status = self._inference.status
        return status.trainer if status is not None else None


# ---------------------------------------------------------------------------------------------- by name


def find_factory(name: str, known: Mapping[str, Factory]) -> Factory:
    """A factory of ours, an installed entry point of the group `reef.runtimes`, or `package.module:name`.

    Only the one that is asked for is imported. Raises ConfigError.
    """
    if name in known:
        return known[name]
    for point in entry_points(group=ENTRY_POINTS, name=name):
        return cast(Factory, call("execution.runtime", name, point.load))
    installed = sorted(point.name for point in entry_points(group=ENTRY_POINTS))
    return load_callable("execution.runtime", name, ", ".join([*known, *installed]))
