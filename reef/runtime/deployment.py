"""One deployment's pair of components: started in order, driven from the service's event loop, watched, closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from reef.errors import BarrierError, EngineUncertain, ReefError, WorkerDied
from reef.points import Point, crossing
from reef.runtime.interfaces import (
    Candidate,
    EngineReport,
    InferenceBackend,
    InferenceHandler,
    Marker,
    Release,
    TrainingBackend,
    TrainingRuntime,
    TrainJob,
)
from reef.runtime.publication import Publication
from reef.runtime.recovery import RestartBudget
from reef.runtime.scheduler import TrainingCoordinator

log = logging.getLogger("reef.deployment")

T = TypeVar("T")


class ExecutionConfig(
    msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename=lambda name: name.replace("_", "-")
):
    """Section `execution`: where workers run."""

    executor: Annotated[
        Literal["mp", "uni"],
        msgspec.Meta(description="mp: engine and trainer in processes of their own; uni: inside the service"),
    ] = "mp"
    start_timeout: Annotated[float, msgspec.Meta(gt=0, description="Seconds that a component may take to start")] = (
        600.0
    )


class CoordinatorRuntime(TrainingRuntime):
    """Drives the coordinator from the event loop; its blocking calls run on one thread, one at a time.

    The same thread repairs engines and trainer, so that a repair never races a publication.
    """

    def __init__(
        self,
        coordinator: TrainingCoordinator,
        publication: Publication,
        engines: InferenceBackend,
        trainer: TrainingBackend | None,
        handler: InferenceHandler,
    ) -> None:
        self._coordinator = coordinator
        self._publication = publication
        self._engines = engines
        self._trainer = trainer
        self._handler = handler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="coordinator")
        self._connected_to = -1  # the publication's engine generation that the handler is connected to
        self._watch: asyncio.Task[None] | None = None
        self._nudge = asyncio.Event()
        self._budgets = {"engine": RestartBudget(), "trainer": RestartBudget()}
        self.fatal: str | None = None
        self.repairing: str | None = None

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start engines and trainer side by side; connect the data plane. Raises what a component raised."""
        loop = asyncio.get_running_loop()
        starts = [loop.run_in_executor(None, self._engines.start)]
        if self._trainer is not None:
            starts.append(loop.run_in_executor(None, self._trainer.start))
        for failure in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure
        await self._connect()

    def watch(self) -> None:
        """Begin to replace what dies; call it after `recover`."""
        self._watch = asyncio.create_task(self._supervise(), name="supervisor")

    async def close(self) -> None:
        """Close everything in reverse order; a failing close hides neither the later ones nor the first error."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        closers: list[Callable[[], Any]] = [self._engines.close]
        if self._trainer is not None:
            closers.insert(0, self._trainer.close)
        await self._handler.close()
        for close in closers:
            try:
                await asyncio.to_thread(close)
            except Exception:
                log.exception("closing a component failed")
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _connect(self) -> None:
        generation = self._publication.generation
        if self._connected_to != generation:
            await self._handler.connect()
            self._connected_to = generation

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        except ReefError as error:
            if isinstance(error, WorkerDied | EngineUncertain | BarrierError):
                self._nudge.set()
            with contextlib.suppress(ReefError):  # engines replaced on the way to the failure
                await self._connect()
            raise
        await self._connect()
        return result

    # ------------------------------------------------------------------ contract

    async def train(self, job: TrainJob, runtime_load_id: str) -> Candidate:
        return await self._call(self._coordinator.train, job, runtime_load_id)

    async def adopt(self, candidate: Candidate) -> Candidate:
        return await self._call(self._coordinator.adopt, candidate)

    async def publish(self, candidate: Candidate) -> None:
        await self._call(self._coordinator.publish, candidate)

    async def acknowledge(self, job_id: str, release: Release) -> None:
        await self._call(self._coordinator.acknowledge, job_id, release)

    async def reject(self, job_id: str, reason: str) -> None:
        await self._call(self._coordinator.reject, job_id, reason)

    async def recover(self, heads: Sequence[Release], committed: bool) -> Candidate | None:
        return await self._call(self._coordinator.recover, heads, committed)

    async def marker(self) -> Marker | None:
        return await asyncio.to_thread(self._coordinator.marker)  # a file read: never waits for a step

    async def engine_reports(self) -> list[EngineReport]:
        """What the engines say of themselves; empty while they cannot answer."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._engines.reports), 5.0)
        except (ReefError, TimeoutError):
            return []

    # ------------------------------------------------------------------ supervision

    def health(self) -> list[str]:
        """Reasons why this deployment cannot serve or train; empty when it can."""
        if self.fatal is not None:
            return [self.fatal]
        found = [self._engines.health(), self._trainer.health() if self._trainer is not None else None]
        reasons = [reason for reason in found if reason is not None]
        if self.repairing is not None:
            reasons.append(self.repairing)
        return reasons

    async def _supervise(self, poll_seconds: float = 0.5) -> None:
        while self.fatal is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(poll_seconds):
                    await self._nudge.wait()
            self._nudge.clear()
            if reason := self._engines.health():
                await self._replace("engine", reason, self._coordinator.repair_engines)
            elif self._trainer is not None and (reason := self._trainer.health()):
                await self._replace("trainer", reason, self._restart_trainer)

    async def _replace(self, component: str, reason: str, repair: Callable[[], None]) -> None:
        delay = self._budgets[component].take()
        if delay is None:
            self.fatal = f"the {component} died too often to be replaced again; last reason: {reason}"
            log.error(self.fatal)
            return
        self.repairing = f"the {component} is being replaced: {reason}"
        log.warning("%s (in %.0f s)", self.repairing, delay)
        try:
            await asyncio.sleep(delay)
            await self._call(repair)
            log.warning("the %s was replaced", component)
        except ReefError as error:
            log.warning("replacing the %s failed: %s", component, error)
        except Exception:  # the supervisor must outlive any failed repair: it tries again within its budget
            log.exception("replacing the %s failed", component)
        finally:
            self.repairing = None

    def _restart_trainer(self) -> None:
        assert self._trainer is not None
        with crossing(Point.RESTART_TRAINER):
            self._trainer.close()
            self._trainer.start()
