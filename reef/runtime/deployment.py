"""One deployment's pair of components: started in order, driven from the service's event loop, watched, closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec

from reef.errors import BarrierError, EngineUncertain, ReefError, TrainingError, Unavailable, WorkerDied
from reef.runtime.executor import KINDS, is_class_path
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

OWED_SECONDS = 30.0
"""How long a committed release may wait for its engines to be resumed before they are replaced."""


class ExecutionConfig(
    msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename=lambda name: name.replace("_", "-")
):
    """Section `execution`: where workers run."""

    executor: Annotated[
        str,
        msgspec.Meta(
            description="mp: engine and trainer in processes of their own; uni: inside the service; ray: as Ray "
            "actors; auto: ray where a cluster's address is known, else mp; or package.module:Class of your own"
        ),
    ] = "mp"
    ray_address: Annotated[
        str,
        msgspec.Meta(
            description="host:port of a Ray cluster that this machine has joined; empty: RAY_ADDRESS, "
            "or a local Ray that lives as long as the service"
        ),
    ] = ""
    cpus_per_worker: Annotated[
        float,
        msgspec.Meta(
            ge=0, description="ray: CPUs reserved for each engine and trainer; it gets as many threads (>= 1)"
        ),
    ] = 1.0
    start_timeout: Annotated[float, msgspec.Meta(gt=0, description="Seconds that a component may take to start")] = (
        600.0
    )

    def __post_init__(self) -> None:
        if self.executor not in KINDS and not is_class_path(self.executor):
            raise ValueError(
                f"executor must be one of {', '.join(KINDS)} or package.module:Class, got {self.executor!r}"
            )
        if self.ray_address and self.executor not in ("ray", "auto"):
            raise ValueError(
                f"ray-address is for the executors ray and auto, got {self.ray_address!r} with executor {self.executor}"
            )
        if self.ray_address != "auto" and self.ray_address and not re.fullmatch(r"[^/\s]+:\d+", self.ray_address):
            raise ValueError(f'ray-address must be host:port or "auto", got {self.ray_address!r}')


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
        self._training = ThreadPoolExecutor(1, thread_name_prefix="training")
        self._reports: asyncio.Task[list[EngineReport]] | None = None  # shared by all who ask meanwhile
        self._connected_to = -1  # the publication's engine generation that the handler is connected to
        self._watch: asyncio.Task[None] | None = None
        self._nudge = asyncio.Event()
        self._budgets = {"engine": RestartBudget(), "trainer": RestartBudget()}
        self.stopped: dict[str, str] = {}  # component -> why it is not replaced any more
        self.repairing: str | None = None

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start engines and trainer, side by side unless they share a device; connect the data plane.

        Raises what a component raised.
        """
        loop = asyncio.get_running_loop()
        if (colocation := self._coordinator.colocation) is not None:
            await loop.run_in_executor(None, self._engines.start)
            await self._call(partial(colocation.start_trainer, resume=False))
            return
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
        for thread in (self._thread, self._training):
            thread.shutdown(wait=False, cancel_futures=True)

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
        if reason := self.stopped.get("trainer"):
            raise Unavailable(reason)
        if (found := await self._call(self._coordinator.begin, job)) is not None:
            return found
        try:
            # On a thread of its own: an engine that dies meanwhile is replaced at once. But where the trainer has the
            # engines' device, a fresh engine has no room before the step is over.
            thread = self._training if self._coordinator.colocation is None else self._thread
            result = await asyncio.get_running_loop().run_in_executor(thread, self._coordinator.compute, job)
        except TrainingError as error:
            await self._call(self._coordinator.fail, job, str(error))
            raise
        except (WorkerDied, EngineUncertain, BarrierError):
            self._nudge.set()
            raise
        return await self._call(self._coordinator.checkpoint, job, result, runtime_load_id)

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
        if self._reports is None or self._reports.done():
            self._reports = asyncio.create_task(asyncio.to_thread(self._engines.reports))
        try:
            return await asyncio.wait_for(asyncio.shield(self._reports), 5.0)
        except (ReefError, TimeoutError):
            return []

    # ------------------------------------------------------------------ supervision

    def health(self) -> list[str]:
        """Reasons why this deployment cannot serve; empty when it can. A dead trainer keeps nobody from serving."""
        reasons = [self.stopped.get("engine"), self.repairing, self._publication.health()]
        return [reason for reason in reasons if reason is not None][:1]

    def training_health(self) -> str | None:
        """Why nothing can be trained now; None when it can, or when nothing is meant to train."""
        if self._trainer is None:
            return None
        return self.stopped.get("trainer") or self._trainer.health()

    async def _supervise(self, poll_seconds: float = 0.5) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(poll_seconds):
                    await self._nudge.wait()
            self._nudge.clear()
            if reason := self._publication.health():
                await self._replace("engine", reason, self._repair_engines)
            elif self._coordinator.owes_seconds > OWED_SECONDS:
                reason = "a committed release could not be resumed"
                await self._replace("engine", reason, self._coordinator.repair_engines)
            elif (
                self._trainer is not None
                and (reason := self._trainer.health())
                and await asyncio.to_thread(self._coordinator.trainer_may_start)
            ):
                await self._replace("trainer", reason, self._restart_trainer)

    async def _replace(self, component: str, reason: str, repair: Callable[[], None]) -> None:
        if component in self.stopped:
            return
        delay = self._budgets[component].take()
        if delay is None:
            self.stopped[component] = f"the {component} died too often to be replaced again; last reason: {reason}"
            log.error(self.stopped[component])
            return
        text = f"the {component} is being replaced: {reason}"
        log.warning("%s (in %.0f s)", text, delay)
        if component == "engine":
            self.repairing = text
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

    def _repair_engines(self) -> None:
        if self._publication.health() is None:  # a publication that was tried again replaced them meanwhile
            self._budgets["engine"].give_back()
            return
        self._coordinator.repair_engines()

    def _restart_trainer(self) -> None:
        if self._coordinator.trainer_may_start():
            self._coordinator.restart_trainer()
        else:  # a rollback began meanwhile; it needs no trainer
            self._budgets["trainer"].give_back()
