"""The worker side of one deployment: engines, trainer, publications and the marker, in one process and watched.

::

    caller's threads ──► one lock ──► TrainingCoordinator ──► TrainingBackend, Publication ──► InferenceBackend
    step thread      ──► the step itself, without the lock: an engine that dies meanwhile is replaced at once
    supervisor       ──► every half second: is each component healthy? else, with the lock, a replacement

Nothing here knows where the caller is: in this process, or behind `reef.runtime.remote`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, RLock, Thread

from reef.errors import (
    BarrierError,
    ConfigError,
    EngineUncertain,
    ReefError,
    Unavailable,
    WorkerDied,
)
from reef.runtime.colocation import Colocation
from reef.runtime.interfaces import (
    Candidate,
    ContentStore,
    CoordinatorStatus,
    EngineReport,
    InferenceBackend,
    Marker,
    MemoryRegion,
    PauseMode,
    Release,
    TrainingBackend,
    TrainJob,
    TransferSession,
)
from reef.runtime.publication import Publication
from reef.runtime.recovery import MarkerFile, Supervisor, Watched
from reef.runtime.scheduler import TrainingCoordinator

log = logging.getLogger("reef.coordinator")

OWED_SECONDS = 30.0
"""How long a committed release may wait for its engines to be resumed before they are replaced."""


class Resources(ABC):
    """What the components run on. Nothing is taken before `open`."""

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class DeploymentPlan:
    """What will run, and nothing of it started. `training` is None where nothing trains."""

    resources: Resources
    inference: InferenceBackend
    training: TrainingBackend | None
    directory: Path  # that every component sees: marker, contents, transfer sessions
    contents: ContentStore
    base_content_id: str
    pause_mode: PauseMode
    probe_ids: list[int]
    colocate: bool = False  # engines and trainer share their devices
    resident: tuple[MemoryRegion, ...] = ()  # of the engines, during a colocated step

    def transfer(self) -> str:
        """The first way of the trainer's that the engines accept too. Raises ConfigError naming both lists."""
        assert self.training is not None
        sent, received = self.training.accepted_transfers, self.inference.accepted_transfers
        for transfer in sent:
            if transfer in received:
                return transfer
        raise ConfigError(
            f"training and inference share no way to transfer weights: the trainer sends by {_listed(sent)}, "
            f"the engines receive by {_listed(received)}"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


class Coordinator:
    """Runs a plan from `start` to `close`. Every method blocks and may be called from any thread."""

    def __init__(self, plan: DeploymentPlan) -> None:
        self._plan = plan
        self._engines, self._trainer = plan.inference, plan.training
        self._publication = Publication(
            self._engines, plan.contents, plan.pause_mode, plan.base_content_id, plan.probe_ids
        )
        self._colocation: Colocation | None = None
        if plan.colocate and self._trainer is not None:
            self._colocation = Colocation(self._publication, self._trainer, plan.resident)
        marker = MarkerFile(plan.directory / "marker.json")
        self._training = TrainingCoordinator(self._trainer, self._publication, plan.contents, marker, self._colocation)
        self._lock = RLock()  # one call, or one repair, at a time
        self._steps_lock = Lock()  # not the other one, which a colocated step holds
        self._steps: dict[str, Future[Candidate]] = {}  # by job, until somebody has taken the outcome
        self._closers: list[tuple[str, Callable[[], None]]] = []  # in order of opening
        self._incarnation = secrets.token_hex(8)
        self._supervisor = Supervisor(
            Watched("engine", self._engine_trouble, self._repair_engines),
            Watched("trainer", self._trainer_trouble, self._restart_trainer),
        )

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Open the resources, start the components, let them meet. Raises what failed, with everything closed again."""
        if self._trainer is not None:
            self._plan.transfer()  # before anything is allocated
        try:
            self._open("resources", self._plan.resources.open, self._plan.resources.close)
            self._start_components()
            self._attach()
            if reason := self._engines.health() or (self._trainer and self._trainer.health()):
                raise WorkerDied(f"not healthy after the start: {reason}")
        except BaseException:
            with contextlib.suppress(ReefError):  # the first error counts; this one is in the log
                self.close()
            raise

    def _start_components(self) -> None:
        engines, trainer = self._engines, self._trainer
        if trainer is None:
            self._open("engines", engines.start, engines.close)
            return
        if self._colocation is not None:
            self._open("engines", engines.start, engines.close)
            self._open("trainer", partial(self._colocation.start_trainer, resume=False), trainer.close)
            return
        with ThreadPoolExecutor(2) as side_by_side:
            starts = [
                side_by_side.submit(self._open, "engines", engines.start, engines.close),
                side_by_side.submit(self._open, "trainer", trainer.start, trainer.close),
            ]
        for started in starts:
            started.result()

    def _open(self, name: str, start: Callable[[], None], close: Callable[[], None]) -> None:
        self._closers.append((name, close))  # first: what failed to start may still hold something
        start()

    def _attach(self) -> None:
        """Let trainer and engines meet in a fresh transfer session. Raises what the one that cannot raises."""
        if self._trainer is None:
            return
        directory = self._plan.directory / "transfer" / secrets.token_hex(8)
        directory.mkdir(parents=True)
        session = TransferSession(self._plan.transfer(), str(directory), secrets.token_hex(16))
        try:
            self._trainer.attach(session)
            self._engines.attach(session)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def supervise(self) -> None:
        """Begin to replace what dies; call it after `recover`. Calling it again changes nothing."""
        self._supervisor.start()

    def close(self) -> None:
        """Close everything in reverse order; a failing close hides neither the later ones nor the first error."""
        self._supervisor.close()
        first: Exception | None = None
        while self._closers:
            name, close = self._closers.pop()
            try:
                close()
            except Exception as error:
                log.exception("closing the %s failed", name)
                first = first or error
        if first is not None:
            raise ReefError(f"not everything could be closed: {first}") from first

    # ------------------------------------------------------------------ jobs

    def train(self, job: TrainJob, runtime_load_id: str, wait: float) -> Candidate | None:
        """One step to a durable, staged candidate; None if it is not there after `wait` seconds: ask again.

        Asking again with the same job never begins a second step while the first one runs, or before its outcome was
        taken. Raises TrainingError, StorageError, EngineError, VerificationError, WorkerDied, Unavailable.
        """
        with self._steps_lock:
            if reason := self._supervisor.stopped.get("trainer"):
                raise Unavailable(reason)
            step = self._steps.get(job.job_id)
            if step is None:
                step = self._steps[job.job_id] = Future()
                Thread(target=self._step, args=(job, runtime_load_id, step), name="step", daemon=True).start()
        try:
            found = step.result(wait)
        except TimeoutError:
            if not step.done():
                return None
            raise
        finally:
            if step.done():
                self._steps.pop(job.job_id, None)
        return found

    def _step(self, job: TrainJob, runtime_load_id: str, step: Future[Candidate]) -> None:
        try:
            step.set_result(self._training.train(job, runtime_load_id, self._lock))
        except BaseException as error:  # whatever it is, it belongs to who waits for the step
            self._nudge_for(error)
            step.set_exception(error)

    def adopt(self, candidate: Candidate) -> Candidate:
        with self._locked():
            return self._training.adopt(candidate)

    def publish(self, candidate: Candidate) -> None:
        with self._locked():
            self._training.publish(candidate)

    def acknowledge(self, job_id: str, release: Release) -> None:
        with self._locked():
            self._training.acknowledge(job_id, release)

    def reject(self, job_id: str, reason: str) -> None:
        with self._locked():
            self._training.reject(job_id, reason)

    def remember(self, release: Release) -> None:
        self._publication.remember(release)

    def recover(self, heads: list[Release], committed: bool) -> Candidate | None:
        """See `TrainingCoordinator.recover`; then everything is watched. Raises TrainingError only once it is."""
        with self._locked():
            self._steps.clear()  # whoever waited for them is gone
            try:
                return self._training.recover(heads, committed)
            finally:
                if self._publication.health() is None:
                    self.supervise()

    def marker(self) -> Marker | None:
        return self._training.marker()  # a file read: waits for nothing

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except ReefError as error:
                self._nudge_for(error)
                raise

    def _nudge_for(self, error: BaseException) -> None:
        if isinstance(error, WorkerDied | EngineUncertain | BarrierError):
            self._supervisor.nudge()

    # ------------------------------------------------------------------ state

    def status(self) -> CoordinatorStatus:
        supervisor = self._supervisor
        trainer = None if self._trainer is None else supervisor.stopped.get("trainer") or self._trainer.health()
        engines = supervisor.stopped.get("engine") or supervisor.repairing.get("engine") or self._publication.health()
        return CoordinatorStatus(
            incarnation=self._incarnation,
            generation=self._publication.generation,
            endpoints=self._engines.endpoints(),
            engines=engines,
            trainer=trainer,
            pause_phases=self._publication.clock.newest,
            memory={} if self._colocation is None else dict(self._colocation.reports),
            step_seconds=None if self._colocation is None else self._colocation.step_seconds,
            residency=self._publication.residency(),
            restarts=dict(supervisor.replaced),
        )

    def reports(self) -> list[EngineReport]:
        return self._engines.reports()

    # ------------------------------------------------------------------ repairs

    def _engine_trouble(self) -> str | None:
        if reason := self._publication.health():
            return reason
        owed = self._training.owes_seconds > OWED_SECONDS
        return "a committed release could not be resumed" if owed else None

    def _repair_engines(self) -> bool:
        with self._lock:
            if self._engine_trouble() is None:  # a publication that was tried again replaced them meanwhile
                return False
            self._training.repair_engines()
            self._attach()
            return True

    def _trainer_trouble(self) -> str | None:
        if self._trainer is None or (reason := self._trainer.health()) is None:
            return None
        return reason if self._training.trainer_may_start() else None

    def _restart_trainer(self) -> bool:
        with self._lock:
            if self._trainer_trouble() is None:  # a rollback began meanwhile; it needs no trainer
                return False
            self._training.restart_trainer()
            self._attach()
            return True
