"""The control loop: RuntimeScheduler (one per scenario, service side) and TrainingCoordinator (worker side).

::

    RuntimeScheduler                         TrainingCoordinator            engines
      wait for reports ── ready? ── turn
      train ───────────────────────────────► RUNNING, step, CHECKPOINT ───► stage, probe
      evaluate (samples the staged candidate) ────────────────────────────► generate
      publish ─────────────────────────────► UPDATING_WEIGHTS ────────────► pause, switch, verify
                                             READY_TO_COMMIT                (paused: the commit gate)
      commit (one database transaction)
      acknowledge ─────────────────────────► HEAD_COMMITTED ──────────────► resume
                                             COMPLETE

The scheduler waits for reports (woken by each one) and for its turn (one job per deployment at a time, oldest first);
the coordinator waits for nobody: each call moves the durable marker forward or leaves it where a retry continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from pathlib import Path

from reef.errors import (
    BarrierError,
    Conflict,
    EngineError,
    ReefError,
    StorageError,
    TrainingError,
    Unavailable,
    WorkerDied,
)
from reef.points import Point, crossing
from reef.runtime.colocation import Colocation
from reef.runtime.interfaces import (
    Candidate,
    ContentStore,
    Marker,
    MarkerState,
    Release,
    TrainingBackend,
    TrainJob,
    TrainResult,
)
from reef.runtime.publication import Publication
from reef.runtime.recovery import MarkerFile

log = logging.getLogger("reef.scheduler")

FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 120.0
"""Seconds that a scenario waits after its step failed: doubled each time, up to the second."""

SETTLED = (MarkerState.COMPLETE, MarkerState.REJECTED)
UNLOCKED = nullcontext()


class TrainingCoordinator:
    """Owns training jobs, publications and their durable marker. Blocking; one thread calls it."""

    def __init__(
        self,
        trainer: TrainingBackend | None,
        publication: Publication,
        contents: ContentStore,
        marker: MarkerFile,
        colocation: Colocation | None = None,
    ) -> None:
        """With `colocation` the trainer shares the engines' device: a step keeps requests waiting."""
        self._trainer = trainer
        self._publication = publication
        self._contents = contents
        self._marker = marker
        self.colocation = colocation
        self._owed: tuple[float, Release] | None = None  # committed, but its engines are not resumed yet

    def marker(self) -> Marker | None:
        return self._marker.read()

    def train(self, job: TrainJob, runtime_load_id: str, lock: AbstractContextManager[object] = UNLOCKED) -> Candidate:
        """One step to a durable, staged candidate. `lock` is held but for the step itself, unless it is colocated.

        Raises TrainingError (the batch is at fault: REJECTED), StorageError, WorkerDied (still RUNNING), EngineError,
        VerificationError (CHECKPOINT); Unavailable while another job is in flight, or where the engines have no slot
        for its candidate; colocated, also BarrierError and EngineUncertain, before the step.
        """
        with lock:
            if (found := self._begin(job)) is not None:
                return found
        try:
            # Where the trainer takes the engines' device, nobody replaces an engine before the step is over.
            with nullcontext() if self.colocation is None else lock:
                result = self._compute(job)
        except TrainingError as error:
            with lock:
                self._settle(self._require(job.job_id, MarkerState.RUNNING), MarkerState.REJECTED, str(error))
            raise
        with lock:
            return self._checkpoint(job, result, runtime_load_id)

    def _begin(self, job: TrainJob) -> Candidate | None:
        """RUNNING, unless this job is a candidate already: then that, staged."""
        if self._trainer is None:
            raise TrainingError("this deployment has no trainer (training.backend is none)")
        found = self._marker.read()
        if found is not None and found.job_id == job.job_id and found.candidate is not None:
            self._publication.stage(found.candidate)
            return found.candidate
        self._require_idle(found, job.job_id)
        self._publication.require_slot(job.scenario)
        self._marker.write(Marker(job_id=job.job_id, scenario=job.scenario, state=MarkerState.RUNNING, updated_at=0.0))
        return None

    def _compute(self, job: TrainJob) -> TrainResult:
        """It touches neither the marker nor, unless colocated, the engines."""
        assert self._trainer is not None
        with nullcontext() if self.colocation is None else self.colocation.step():
            try:
                with crossing(Point.TRAIN):
                    return self._trainer.train(job)
            except (TrainingError, StorageError, WorkerDied):
                raise
            except Exception as error:  # whatever a trainer's library raises on this batch
                raise TrainingError(f"{type(error).__name__}: {error}") from error

    def _checkpoint(self, job: TrainJob, result: TrainResult, runtime_load_id: str) -> Candidate:
        marker = self._require(job.job_id, MarkerState.RUNNING)
        marker.candidate = self._candidate(job, result, runtime_load_id)
        marker.state = MarkerState.CHECKPOINT
        self._marker.write(marker)
        shutil.rmtree(job.output_path, ignore_errors=True)
        self._publication.stage(marker.candidate)
        return marker.candidate

    def _candidate(self, job: TrainJob, result: TrainResult, runtime_load_id: str) -> Candidate:
        assert self._trainer is not None
        return Candidate(
            job_id=job.job_id,
            scenario=job.scenario,
            content_id=self._contents.put(Path(result.weights_path)),
            state_id=self._contents.put(Path(result.state_path)),
            kind=self._trainer.weight_kind,
            runtime_load_id=runtime_load_id,
            probe_logprobs=result.probe_logprobs,
            incumbent_probe_logprobs=result.incumbent_probe_logprobs,
            metrics={**job.signal.metrics, **result.metrics},
            consumed=job.consumed,
            algorithm_state=job.algorithm_state,
        )

    def adopt(self, candidate: Candidate) -> Candidate:
        """Begin at CHECKPOINT with bytes that exist already."""
        self._require_idle(self._marker.read(), candidate.job_id)
        self._publication.require_slot(candidate.scenario, candidate.content_id)
        self._marker.write(
            Marker(
                job_id=candidate.job_id,
                scenario=candidate.scenario,
                state=MarkerState.CHECKPOINT,
                updated_at=0.0,
                candidate=candidate,
            )
        )
        self._publication.stage(candidate)
        return candidate

    def publish(self, candidate: Candidate) -> None:
        """Pause, switch, verify; leave everything paused at READY_TO_COMMIT.

        Raises BarrierError after the engines were retired: the marker is then UPDATING_WEIGHTS and calling again
        publishes in full, to engines that were rebuilt since, or now.
        """
        marker = self._require(
            candidate.job_id, MarkerState.CHECKPOINT, MarkerState.UPDATING_WEIGHTS, MarkerState.READY_TO_COMMIT
        )
        if marker.state is MarkerState.READY_TO_COMMIT:
            return
        if marker.state is MarkerState.UPDATING_WEIGHTS:
            self._publication.renew()
            self._publication.stage(candidate)
        else:
            # Durable before the pause: a marker that cannot be written must not leave anything paused.
            marker.state = MarkerState.UPDATING_WEIGHTS
            self._marker.write(marker)
            self._publication.pause()
        self._publication.switch(candidate)
        marker.state = MarkerState.READY_TO_COMMIT
        self._marker.write(marker)
        self._publication.clock.lap("ready marker")

    def acknowledge(self, job_id: str, release: Release) -> None:
        """The release is in the database: HEAD_COMMITTED, resume, COMPLETE. A failed resume may be retried.

        Engines that were replaced behind the gate (UPDATING_WEIGHTS) are rebuilt with the release that is now the head.
        """
        marker = self._require(
            job_id,
            MarkerState.READY_TO_COMMIT,
            MarkerState.UPDATING_WEIGHTS,
            MarkerState.HEAD_COMMITTED,
            MarkerState.COMPLETE,
        )
        if marker.state is MarkerState.COMPLETE:
            return
        self._publication.clock.lap("commit")
        self._owe(release)
        replaced = marker.state is MarkerState.UPDATING_WEIGHTS
        marker.state = MarkerState.HEAD_COMMITTED
        self._marker.write(marker)
        self._publication.clock.lap("head marker")
        if replaced:
            self._publication.rebuild(resume=True)
        else:
            self._publication.finish(release)
        self._settle(marker, MarkerState.COMPLETE, None)
        self._owed = None

    def _owe(self, release: Release) -> None:
        """From now on fresh engines get this head, whatever the marker says."""
        if self._owed is None:
            self._owed = (time.monotonic(), release)
        self._publication.commit_head(release)

    @property
    def owes_seconds(self) -> float:
        """For how long a committed release has not been resumed; 0.0 if none is waiting."""
        return time.monotonic() - self._owed[0] if self._owed is not None else 0.0

    def reject(self, job_id: str, reason: str) -> None:
        """Incumbent resources restored, then REJECTED. Legal from any state before HEAD_COMMITTED.

        The engines come first: a marker that cannot be written must not keep them paused. Repeat it after StorageError.
        """
        marker = self._marker.read()
        if marker is None or marker.job_id != job_id or marker.state in SETTLED:
            return
        if marker.state is MarkerState.HEAD_COMMITTED or self._owed is not None:
            raise Conflict(f"job {job_id} is committed and can no longer be rejected; roll back instead")
        marker.state, marker.error = MarkerState.REJECTING, reason
        try:
            self._marker.write(marker)
        finally:
            if marker.candidate is not None:
                self._withdraw(marker.candidate)
        self._settle(marker, MarkerState.REJECTED, reason)

    def _withdraw(self, candidate: Candidate) -> None:
        try:
            self._publication.withdraw(candidate)
        except (EngineError, WorkerDied, BarrierError) as error:
            log.warning("withdrawing %s: engines are replaced (%s)", candidate.job_id, error)
            self._publication.rebuild(resume=True)

    def recover(self, heads: Sequence[Release], committed: bool) -> Candidate | None:
        """Engines get the committed heads; the marker is settled, or its candidate handed back to go on with."""
        marker = self._marker.read()
        self._publication.prepare_recovery(heads)
        if marker is None or marker.state in SETTLED:
            return None
        if marker.scenario not in {head.scenario for head in heads}:
            self._settle(marker, MarkerState.REJECTED, f"scenario {marker.scenario!r} is not in the database")
            return None
        if committed:
            self._settle(marker, MarkerState.COMPLETE, None)
            return None
        if marker.state is MarkerState.RUNNING:
            immutable = self._trainer is None or self._trainer.immutable_candidates
            self._settle(marker, MarkerState.REJECTED, "interrupted in mid-step")
            if not immutable:
                raise TrainingError(
                    f"job {marker.job_id} of scenario {marker.scenario!r} was interrupted in mid-step and its trainer "
                    "cannot prove the incumbent unchanged; inspect its checkpoints, then start again to retrain"
                )
            return None
        if marker.state is MarkerState.REJECTING or marker.candidate is None:
            self._settle(marker, MarkerState.REJECTED, marker.error)
            return None
        # The engines have the heads, so whatever the interrupted publication did to them is gone.
        marker.state = MarkerState.CHECKPOINT
        self._marker.write(marker)
        try:
            self._publication.stage(marker.candidate)
        except ReefError as error:
            log.warning("the candidate of the interrupted job %s is given up: %s", marker.job_id, error)
            self.reject(marker.job_id, str(error))
            return None
        return marker.candidate

    def repair_engines(self) -> None:
        """Replace dead engines by fresh ones with the committed heads; they stay paused behind an open commit gate."""
        if self.colocation is not None:
            self.colocation.make_room()
        marker = self._marker.read()
        if self._owed is not None and marker is not None:
            self._publication.rebuild(resume=True)
            self._settle(marker, MarkerState.COMPLETE, None)
            self._owed = None
        elif marker is None or marker.state in SETTLED or marker.state is MarkerState.RUNNING:
            self._publication.rebuild(resume=True)
        elif marker.state is MarkerState.REJECTING:
            self._publication.rebuild(resume=True)
            self._settle(marker, MarkerState.REJECTED, marker.error)
        elif marker.state is MarkerState.CHECKPOINT:
            assert marker.candidate is not None
            self._publication.rebuild(resume=True)
            self._publication.stage(marker.candidate)
        elif marker.state is MarkerState.HEAD_COMMITTED:
            self._publication.rebuild(resume=True)
            self._settle(marker, MarkerState.COMPLETE, None)
        else:  # UPDATING_WEIGHTS or READY_TO_COMMIT: the transfer is repeated in full, or the commit decides
            marker.state = MarkerState.UPDATING_WEIGHTS
            self._marker.write(marker)
            self._publication.rebuild(resume=False)

    def trainer_may_start(self) -> bool:
        """False while that would take the device from engines that hold a candidate."""
        if self.colocation is None:
            return True
        marker = self._marker.read()
        return self._owed is None and (marker is None or marker.state in (*SETTLED, MarkerState.RUNNING))

    def restart_trainer(self) -> None:
        """Replace the trainer. Raises what it raised at its start."""
        assert self._trainer is not None
        with crossing(Point.RESTART_TRAINER):
            self._trainer.close()
            if self.colocation is None:
                self._trainer.start()
            else:
                self.colocation.start_trainer(resume=True)

    def _require_idle(self, found: Marker | None, job_id: str) -> None:
        if found is not None and found.state not in SETTLED and found.job_id != job_id:
            raise Unavailable(
                f"job {found.job_id} of scenario {found.scenario!r} is in flight ({found.state}); one job at a time"
            )

    def _require(self, job_id: str, *states: MarkerState) -> Marker:
        marker = self._marker.read()
        if marker is None or marker.job_id != job_id or marker.state not in states:
            found = "nothing" if marker is None else f"job {marker.job_id} in {marker.state}"
            raise Conflict(f"job {job_id} must be in {' or '.join(states)}; the marker holds {found}")
        return marker

    def _settle(self, marker: Marker, state: MarkerState, error: str | None) -> None:
        marker.state, marker.error = state, error
        self._marker.write(marker)


class RuntimeScheduler:
    """Runs one scenario's learning: waits until a step is due, takes its turn, and lets the scenario learn.

    `due` ingests what is new and says whether a step is ready; `learn` does one step. `turn` is shared by all scenarios
    of a deployment; it is fair, so the scenario that became ready first goes first. One whose step fails waits longer
    and longer, without the turn.
    """

    def __init__(
        self,
        name: str,
        due: Callable[[], Awaitable[bool]],
        learn: Callable[[], Awaitable[None]],
        turn: asyncio.Lock,
        poll_seconds: float = 1.0,
    ) -> None:
        self._name = name
        self._due = due
        self._learn = learn
        self._turn = turn
        self._poll_seconds = poll_seconds
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.error: str | None = None

    def start(self) -> None:
        # Not in the context of the request that made the scenario: its log lines would name that one for ever.
        self._task = asyncio.create_task(self._run(), name=f"scheduler:{self._name}", context=Context())

    def wake(self) -> None:
        self._wake.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                if await self._due():
                    async with self._turn:
                        await self._learn()
                else:
                    await self._sleep(self._poll_seconds)
                self.error, failures = None, 0
            except asyncio.CancelledError:
                raise
            except Exception as error:
                # The loop must outlive any failed step: serving goes on, the reason is shown, the step is retried.
                self.error = f"{type(error).__name__}: {error}"
                level = logging.WARNING if isinstance(error, ReefError) else logging.ERROR
                log.log(level, "scenario %s: %s", self._name, self.error, exc_info=not isinstance(error, ReefError))
                await asyncio.sleep(min(FIRST_BACKOFF * 2**failures, LONGEST_BACKOFF))
                failures += 1

    async def _sleep(self, seconds: float) -> None:
        # Not wait_for: in Python 3.11 it swallows a cancellation that meets the wake-up.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()
