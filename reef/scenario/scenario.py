"""One workload: its records, its trainer and its release chain, and the order in which a step becomes a release."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.artifact import chain
from reef.errors import (
    BarrierError,
    Conflict,
    EngineError,
    NotFound,
    ReefError,
    StorageError,
    TrainingError,
    VerificationError,
    WorkerDied,
)
from reef.runtime.interfaces import (
    INCARNATION,
    Batch,
    Candidate,
    CandidateSampler,
    Commit,
    CommitKind,
    Consumption,
    ContentStore,
    Decision,
    Disposition,
    Evaluation,
    Evaluator,
    InferenceRecord,
    InstructionRecord,
    Recipe,
    Release,
    ReleaseKind,
    ReportRecord,
    ScenarioState,
    Storage,
    TrainingRuntime,
    TrainJob,
    WeightKind,
)
from reef.runtime.scheduler import RuntimeScheduler

log = logging.getLogger("reef.scenario")

INGEST_LIMIT = 500
COMMIT_ATTEMPTS = 3
PUBLISH_ATTEMPTS = 3
ACKNOWLEDGE_ATTEMPTS = 5


@dataclass(slots=True)
class Services:
    """What every scenario of a deployment shares."""

    storage: Storage
    contents: ContentStore
    runtime: TrainingRuntime
    recipe: Recipe
    evaluator: Evaluator
    sampler: Callable[[Candidate, Release], CandidateSampler]
    turn: asyncio.Lock
    scratch: Path  # trainers write candidates below it
    base_content_id: str
    probe_ids: list[int]
    released: Callable[[], Awaitable[None]]  # called after every release, while the turn is still held


@dataclass(slots=True)
class InFlight:
    """A step between its batch and its commit; kept across failed attempts so that a retry continues."""

    batch: Batch | None  # None: recovered from the marker
    job: TrainJob | None
    runtime_load_id: str
    candidate: Candidate | None = None
    evaluation: Evaluation | None = None
    decision: Decision | None = None
    attempts: int = 0  # publications that failed


class Scenario:
    """Binds records, recipe, runtime and chain. `head` is always the committed release that serves."""

    def __init__(self, state: ScenarioState, services: Services) -> None:
        self.name = state.scenario
        self.head = state.head
        self.recipe = services.recipe
        self._step = state.step
        self._services = services
        self._processor = services.recipe.processor(state.algorithm_state)
        self._cursor = 0
        self._numbers: dict[str, int] = {state.head.release_id: state.head.number}
        self._in_flight: InFlight | None = None
        self._forced = False
        self._last_outcome = ""
        self._scheduler = RuntimeScheduler(self.name, self._due, self._learn, services.turn)

    # ------------------------------------------------------------------ life

    async def start(self, recovered: Candidate | None = None) -> None:
        """Begin learning; `recovered` is the candidate of an interrupted job, evaluated and published first."""
        for release in await self._services.storage.releases(self.name, limit=10_000):
            self._numbers[release.release_id] = release.number
        if recovered is not None:
            self._in_flight = InFlight(None, None, recovered.runtime_load_id, recovered)
        if self._processor is not None or recovered is not None:
            self._scheduler.start()

    async def close(self) -> None:
        await self._scheduler.close()

    async def write_off_recovered(self, candidate: Candidate, reason: str) -> None:
        """A candidate was rejected just before the service died: consume its records now. Call before `start`."""
        await self._write_off(InFlight(None, None, candidate.runtime_load_id, candidate), reason)

    # ------------------------------------------------------------------ what clients say

    async def report(self, record: ReportRecord) -> ReportRecord:
        """Store a report durably. Raises InvalidRequest, UnknownReceipt, Conflict, StorageError."""
        self.recipe.validate_report(record)
        stored = await self._services.storage.append(record)
        assert isinstance(stored, ReportRecord)
        self._scheduler.wake()
        return stored

    async def instruct(self, record: InstructionRecord) -> InstructionRecord:
        """Store a training instruction durably and let the scheduler look at once."""
        stored = await self._services.storage.append(record)
        assert isinstance(stored, InstructionRecord)
        self._scheduler.wake()
        return stored

    async def update(self) -> dict[str, Any]:
        """Train on what waits now, without waiting for a full batch."""
        if self._processor is None:
            raise Conflict(f"recipe {self.recipe.name!r} never trains")
        await self._ingest()
        waiting = self._processor.counts()
        self._forced = bool(waiting.get("pending"))
        self._scheduler.wake()
        return {"started": self._forced, "waiting": waiting}

    async def contract(self) -> dict[str, Any]:
        return {"scenario": self.name, **self.recipe.contract(), "eligibility_counts": await self._eligibility()}

    async def status(self) -> dict[str, Any]:
        return {
            "scenario": self.name,
            "step": self._step,
            "head": {
                "release_id": self.head.release_id,
                "number": self.head.number,
                "kind": self.head.kind,
                "runtime_load_id": self.head.runtime_load_id,
            },
            "recipe": self.recipe.name,
            "counts": await self._services.storage.counts(self.name),
            "waiting": self._processor.counts() if self._processor is not None else {},
            "in_flight": self._in_flight is not None,
            "last_outcome": self._last_outcome,
            "error": self._scheduler.error,
        }

    async def _eligibility(self) -> dict[str, int]:
        counts = Counter(await self._services.storage.counts(self.name))
        if self._processor is not None:
            counts.update({f"waiting.{reason}": number for reason, number in self._processor.counts().items()})
        return dict(counts)

    # ------------------------------------------------------------------ chain by hand

    async def rollback(self, release_id: str | None = None) -> Release:
        """Publish the content of an earlier release (default: the head's parent's) as a new release."""
        storage = self._services.storage
        async with self._services.turn:
            releases = await storage.releases(self.name, limit=10_000)
            target = chain.rollback_target(releases, self.head, release_id)
            return await self._publish_existing(target, ReleaseKind.ROLLBACK)

    async def promote(self, source: str) -> Release:
        """Publish by hand a release's content, or the candidate of a rejected job, as a new release."""
        storage = self._services.storage
        async with self._services.turn:
            release = await storage.release(self.name, source)
            if release is None:
                release = await self._rejected_as_release(source)
            return await self._publish_existing(release, ReleaseKind.PROMOTED)

    async def _rejected_as_release(self, job_id: str) -> Release:
        commit = await self._services.storage.commit_by_job(job_id)
        found = commit.metrics.get("candidate") if commit and commit.scenario == self.name else None
        if commit is None or found is None or not self._services.contents.exists(found["content_id"]):
            raise NotFound(f"scenario {self.name!r} has no release and no kept candidate {job_id!r}")
        return Release(
            release_id=job_id,
            scenario=self.name,
            number=self.head.number,
            parent_id=None,
            kind=ReleaseKind.PROMOTED,
            content_id=found["content_id"],
            state_id=found["state_id"],
            runtime_load_id="",
            created_at=commit.created_at,
            metrics={"probe_logprobs": found["probe_logprobs"]},
        )

    async def _publish_existing(self, source: Release, origin: ReleaseKind) -> Release:
        if self._in_flight is not None:
            await self._abandon(f"superseded by a {origin}")
        services = self._services
        candidate = Candidate(
            job_id=f"job_{uuid.uuid4().hex}",
            scenario=self.name,
            content_id=source.content_id,
            state_id=source.state_id,
            kind=WeightKind.LORA,
            runtime_load_id=await self._next_load_id(),
            probe_logprobs=source.metrics.get("probe_logprobs", []),
            incumbent_probe_logprobs=self.head.metrics.get("probe_logprobs", []),
            origin=origin,
            source_release_id=source.release_id,
        )
        try:
            await services.runtime.adopt(candidate)
            await services.runtime.publish(candidate)
            return await self._commit_release(candidate, Evaluation())
        except ReefError as error:
            await services.runtime.reject(candidate.job_id, str(error))
            raise

    async def _abandon(self, reason: str) -> None:
        flight, self._in_flight = self._in_flight, None
        if flight is not None:
            job_id = flight.candidate.job_id if flight.candidate else flight.job.job_id if flight.job else ""
            await self._services.runtime.reject(job_id, reason)

    # ------------------------------------------------------------------ learning

    async def _due(self) -> bool:
        if self._in_flight is not None:
            return True
        if self._processor is None:
            return False
        await self._ingest()
        discarded = self._processor.expire(self.head.number, time.time(), self._numbers)
        await self._discard(discarded)
        return self._forced or self._processor.ready(time.time())

    async def _ingest(self) -> None:
        """Hand the processor every report it has not seen; write off at once what can never train."""
        assert self._processor is not None
        storage = self._services.storage
        while reports := await storage.pending_reports(self.name, self._cursor, INGEST_LIMIT):
            receipts = list({receipt for report in reports for receipt in report.references})
            consumed = await storage.consumed(self.name, receipts)
            found = await storage.get(self.name, [receipt for receipt in receipts if receipt not in consumed])
            records = {key: record for key, record in found.items() if isinstance(record, InferenceRecord)}
            discarded: list[Consumption] = []
            for report in reports:
                discarded += self._processor.ingest(report, records, consumed)
            self._cursor = reports[-1].sequence
            await self._discard(discarded)

    async def _discard(self, discarded: list[Consumption]) -> None:
        if discarded:
            reasons = Counter(f"{item.disposition}: {item.reason}" for item in discarded)
            log.info("scenario %s: %d never train (%s)", self.name, len(discarded), dict(reasons))
            await self._commit(CommitKind.DISCARDED, consumed=discarded, metrics={"reasons": dict(reasons)})

    async def _learn(self) -> None:
        """One step: a batch, a candidate, a judgement, and a release or a rejection."""
        if self._in_flight is None:
            self._in_flight = await self._begin()
        flight = self._in_flight
        if flight is None:
            return
        try:
            if flight.candidate is None:
                assert flight.job is not None
                flight.candidate = await self._services.runtime.train(flight.job, flight.runtime_load_id)
            await self._judge(flight, flight.candidate)
            await self._conclude(flight, flight.candidate)
        except (TrainingError, VerificationError, Conflict) as error:
            # The fault lies with this step, so repeating it cannot help: write it off and go on serving.
            await self._write_off(flight, str(error))
        self._in_flight = None
        if self._processor is not None:
            recovered = flight.candidate.consumed if flight.candidate is not None else []
            self._processor.acknowledge(flight.batch or Batch(samples=[], consumed=recovered, metrics={}))

    async def _begin(self) -> InFlight | None:
        assert self._processor is not None
        self._forced = False
        batch = self._processor.build(time.time())
        if not batch.samples and not batch.consumed:
            return None
        if not batch.signal or not batch.samples:
            await self._commit(
                CommitKind.NO_SIGNAL,
                consumed=batch.consumed,
                metrics={**batch.metrics, "outcome": "no signal"},
                algorithm_state=self._processor.state(),
            )
            self._processor.acknowledge(batch)
            self._last_outcome = "no signal"
            return None
        job_id = f"job_{uuid.uuid4().hex}"
        contents = self._services.contents
        is_base = self.head.content_id == self._services.base_content_id
        state_id = self.head.state_id
        job = TrainJob(
            job_id=job_id,
            scenario=self.name,
            step=self._step + 1,
            signal=self.recipe.prepare(batch),
            incumbent_path=None if is_base else str(contents.path(self.head.content_id)),
            state_path=str(contents.path(state_id)) if state_id and contents.exists(state_id) else None,
            output_path=str(self._services.scratch / job_id),
            probe_ids=self._services.probe_ids,
            consumed=batch.consumed,
            algorithm_state=self._processor.state(),
        )
        return InFlight(batch, job, await self._next_load_id())

    async def _judge(self, flight: InFlight, candidate: Candidate) -> None:
        """Evaluation decides; whatever it raises rejects (fail closed)."""
        if flight.decision is not None:
            return
        evaluator = self._services.evaluator
        try:
            flight.evaluation = await evaluator.evaluate(candidate, self._services.sampler(candidate, self.head))
            flight.decision = evaluator.decide(candidate, flight.evaluation)
        except Exception as error:
            log.warning("scenario %s: the evaluation of %s failed", self.name, candidate.job_id, exc_info=True)
            flight.evaluation = Evaluation()
            flight.decision = Decision(False, f"the evaluation failed: {type(error).__name__}: {error}")

    async def _conclude(self, flight: InFlight, candidate: Candidate) -> None:
        assert flight.decision is not None and flight.evaluation is not None
        if not flight.decision.selected:
            await self._write_off(flight, flight.decision.reason)
            return
        try:
            await self._services.runtime.publish(candidate)
        except (BarrierError, EngineError, WorkerDied) as error:
            flight.attempts += 1
            if flight.attempts < PUBLISH_ATTEMPTS:
                raise
            await self._write_off(flight, f"publication failed {flight.attempts} times, last: {error}")
            return
        await self._commit_release(candidate, flight.evaluation)
        self._last_outcome = f"released {self.head.release_id}: {flight.decision.reason}"

    async def _commit_release(self, candidate: Candidate, evaluation: Evaluation) -> Release:
        """The commit gate: one transaction moves the head; only then may the engines resume."""
        release = chain.next_release(self.head, candidate, evaluation, time.time())
        kind = {ReleaseKind.ROLLBACK: CommitKind.ROLLBACK, ReleaseKind.PROMOTED: CommitKind.PROMOTED}
        commit = Commit(
            commit_id=candidate.job_id,
            scenario=self.name,
            kind=kind.get(candidate.origin, CommitKind.TRAINED),
            created_at=release.created_at,
            job_id=candidate.job_id,
            expected_head=self.head.release_id,
            release=release,
            consumed=candidate.consumed,
            algorithm_state=candidate.algorithm_state,
            metrics={**candidate.metrics, "evaluation": evaluation.scores},
        )
        stored = await self._commit_durably(commit)
        self.head = stored.release or release
        self._step = stored.step
        self._numbers[self.head.release_id] = self.head.number
        await self._acknowledge(candidate.job_id)
        await self._services.released()
        return self.head

    async def _acknowledge(self, job_id: str) -> None:
        """Nothing can undo a commit, so a failing resume is repeated while the supervisor replaces engines."""
        for attempt in range(ACKNOWLEDGE_ATTEMPTS):
            try:
                await self._services.runtime.acknowledge(job_id, self.head)
                return
            except (WorkerDied, EngineError, BarrierError, VerificationError) as error:
                log.warning("scenario %s: %s is committed but not resumed yet: %s", self.name, job_id, error)
                await asyncio.sleep(2**attempt)
        log.error("scenario %s: %s is committed; the supervisor must resume the engines", self.name, job_id)

    async def _commit_durably(self, commit: Commit) -> Commit:
        """Serving is paused behind this commit, so a store that refuses is asked again only a few times."""
        for attempt in range(COMMIT_ATTEMPTS):
            try:
                return await self._services.storage.commit(commit)
            except StorageError:
                if attempt == COMMIT_ATTEMPTS - 1:
                    assert commit.job_id is not None
                    await self._services.runtime.reject(commit.job_id, "the release could not be committed")
                    self._in_flight = None
                    raise
                await asyncio.sleep(0.2 * 2**attempt)
        raise AssertionError("unreachable")

    async def _write_off(self, flight: InFlight, reason: str) -> None:
        """The step ends without a release: incumbent restored, its records consumed as rejected."""
        candidate, job = flight.candidate, flight.job
        job_id = candidate.job_id if candidate else job.job_id if job else ""
        try:
            await self._services.runtime.reject(job_id, reason)
        except EngineError:
            log.exception("scenario %s: rejecting %s failed", self.name, job_id)
            raise
        consumed = candidate.consumed if candidate else job.consumed if job else []
        metrics: dict[str, Any] = {**(candidate.metrics if candidate else {}), "reason": reason}
        if flight.evaluation is not None:
            metrics["evaluation"] = flight.evaluation.scores
        if candidate is not None:
            metrics["candidate"] = {
                "content_id": candidate.content_id,
                "state_id": candidate.state_id,
                "probe_logprobs": candidate.probe_logprobs,
            }
        trained = {Disposition.TRAINED: Disposition.REJECTED}
        await self._commit(
            CommitKind.REJECTED,
            job_id=job_id,
            consumed=[
                Consumption(item.record_id, trained.get(item.disposition, item.disposition), item.reason)
                for item in consumed
            ],
            metrics=metrics,
            algorithm_state=candidate.algorithm_state if candidate else job.algorithm_state if job else None,
        )
        self._last_outcome = f"rejected: {reason}"

    async def _commit(
        self,
        kind: CommitKind,
        *,
        consumed: list[Consumption],
        metrics: dict[str, Any],
        job_id: str | None = None,
        algorithm_state: dict[str, Any] | None = None,
    ) -> None:
        stored = await self._services.storage.commit(
            Commit(
                commit_id=job_id or f"commit_{uuid.uuid4().hex}",
                scenario=self.name,
                kind=kind,
                created_at=time.time(),
                job_id=job_id,
                consumed=consumed,
                metrics=metrics,
                algorithm_state=algorithm_state,
            )
        )
        self._step = stored.step

    async def _next_load_id(self) -> str:
        return f"{INCARNATION}:{await self._services.storage.next_load_sequence()}"
