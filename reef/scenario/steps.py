"""One candidate at a time, from a batch (or somebody's wish) to a release or a rejection.

A flight holds the deployment's turn until it ends, however often it has to try again: the durable marker has room for
one job, and what is half done must be ended before anybody else begins. It ends as

- a release: published, committed, acknowledged. After the commit nothing can reject it.
- a rejection: the step's own fault or the evaluation's verdict. Its records are consumed.
- given back: the machinery failed too often. Nothing is consumed; the records train later, and until something went
  well again the scenario has one attempt a turn, so that it holds nobody up.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.artifact import chain
from reef.errors import Conflict, LeaseLost, ReefError, TrainingError, Unavailable, VerificationError, WorkerDied
from reef.metrics import PUBLICATIONS, STALENESS, STEPS, TRAINING_SECONDS, count_consumed, scenario_label
from reef.runtime.interfaces import (
    INCARNATION,
    Batch,
    Candidate,
    CandidateBackend,
    Commit,
    CommitKind,
    Consumption,
    ContentStore,
    Decision,
    Disposition,
    Evaluation,
    Evaluator,
    PauseMode,
    Recipe,
    Release,
    ReleaseKind,
    ScenarioState,
    StepSignal,
    Storage,
    TrainJob,
    WeightKind,
)
from reef.tracing import span

log = logging.getLogger("reef.scenario")

ATTEMPTS = 5
DEADLY_BATCH = 3  # a batch under which the trainer died this often is written off
LONGEST_WAIT = 15.0  # seconds between attempts
COMMIT_KINDS = {ReleaseKind.ROLLBACK: CommitKind.ROLLBACK, ReleaseKind.PROMOTED: CommitKind.PROMOTED}


@dataclass(slots=True)
class Services:
    """What every scenario of a deployment shares."""

    storage: Storage
    contents: ContentStore
    candidates: CandidateBackend
    recipe: Recipe
    evaluator: Evaluator
    turn: asyncio.Lock
    scratch: Path  # trainers write candidates below it
    base_content_id: str
    probe_ids: list[int]
    released: Callable[[], Awaitable[None]]  # called after every release, while the turn is still held
    elsewhere: Callable[[], str | None] = lambda: None  # why another process must train, release, roll back
    may_train: Callable[[str], bool] = lambda _: True  # whether training is permitted for a scenario
    pause_mode: PauseMode = PauseMode.IN_PLACE  # what a publication does to requests in flight; releases say it


@dataclass(slots=True)
class Flight:
    """A candidate on its way. Exactly one of `job` and `candidate` is there at the start."""

    runtime_load_id: str
    job: TrainJob | None = None
    batch: Batch | None = None
    candidate: Candidate | None = None
    adopted: bool = True  # False: the coordinator does not know the candidate yet
    begun: bool = False  # the coordinator may hold the job, so it has to be ended there, whatever happens
    evaluation: Evaluation | None = None
    decision: Decision | None = None
    commit: Commit | None = None  # built once, so that repeating it is harmless
    attempts: int = 0
    deaths: int = 0
    impatient: bool = False  # given back after one attempt: its scenario was given back before
    give_back: bool = False

    @property
    def job_id(self) -> str:
        if self.candidate is not None:
            return self.candidate.job_id
        assert self.job is not None
        return self.job.job_id

    @property
    def consumed(self) -> list[Consumption]:
        return self.candidate.consumed if self.candidate is not None else self.job.consumed if self.job else []

    @property
    def algorithm_state(self) -> dict[str, Any] | None:
        known = self.candidate or self.job
        return known.algorithm_state if known is not None else None


class Steps:
    """One scenario's steps. `head` is always the committed release; call `run` and `by_hand` with the turn held."""

    def __init__(self, state: ScenarioState, services: Services) -> None:
        self.name = state.scenario
        self.head = state.head
        self.step = state.step
        self.numbers = {state.head.release_id: state.head.number}  # of every release in the chain
        self.in_flight = False
        self.outcome = ""
        self.trouble: str | None = None  # why the flight has to try again
        self._gave_back = False  # the latest batch
        self._services = services

    # ------------------------------------------------------------------ beginnings

    async def from_batch(self, batch: Batch, signal: StepSignal, algorithm_state: dict[str, Any]) -> Flight:
        """A step from the committed incumbent."""
        services, head = self._services, self.head
        contents, state_id = services.contents, head.state_id
        job_id = _new_job_id()
        is_base = head.content_id == services.base_content_id
        job = TrainJob(
            job_id=job_id,
            scenario=self.name,
            step=self.step + 1,
            signal=signal,
            incumbent_path=None if is_base else str(contents.path(head.content_id)),
            state_path=str(contents.path(state_id)) if state_id and contents.exists(state_id) else None,
            output_path=str(services.scratch / job_id),
            probe_ids=services.probe_ids,
            consumed=batch.consumed,
            algorithm_state=algorithm_state,
        )
        return Flight(await self._next_load_id(), job=job, batch=batch, impatient=self._gave_back)

    @staticmethod
    def recovered(candidate: Candidate) -> Flight:
        """The candidate of an interrupted job. What was wished for by hand is not judged again."""
        flight = Flight(candidate.runtime_load_id, candidate=candidate, begun=True)
        if candidate.origin is not ReleaseKind.TRAINED:
            flight.evaluation, flight.decision = Evaluation(), Decision(True, "wished for before a restart")
        return flight

    async def by_hand(self, source: Release, origin: ReleaseKind) -> Release:
        """Publish the content of `source` as a new release. Raises Unavailable if another job is in flight."""
        candidate = Candidate(
            job_id=_new_job_id(),
            scenario=self.name,
            content_id=source.content_id,
            state_id=source.state_id,
            kind=WeightKind.LORA,  # the content itself tells; nobody reads this
            runtime_load_id=await self._next_load_id(),
            probe_logprobs=source.metrics.get("probe_logprobs", []),
            incumbent_probe_logprobs=self.head.metrics.get("probe_logprobs", []),
            origin=origin,
            source_release_id=source.release_id,
        )
        decision = Decision(True, "wished for")
        flight = Flight(
            candidate.runtime_load_id, candidate=candidate, adopted=False, evaluation=Evaluation(), decision=decision
        )
        await self.run(flight)
        assert flight.decision is not None
        if not flight.decision.selected:
            raise Unavailable(f"{origin} to {source.release_id} failed: {flight.decision.reason}")
        return self.head

    async def _next_load_id(self) -> str:
        return f"{INCARNATION}:{await self._services.storage.next_load_sequence()}"

    # ------------------------------------------------------------------ the way

    async def run(self, flight: Flight) -> None:
        """Carry the flight to its end. Raises Unavailable if it could not begin, or was given back."""
        self.in_flight = True
        try:
            while not await self._attempt(flight):
                await asyncio.sleep(min(0.5 * 2**flight.attempts, LONGEST_WAIT))
        finally:
            self.in_flight, self.trouble = False, None
        if flight.batch is not None:
            self._gave_back = flight.give_back
        if flight.give_back:
            assert flight.decision is not None
            raise Unavailable(flight.decision.reason)

    async def _attempt(self, flight: Flight) -> bool:
        """Go on from where the flight is; True when it ended."""
        try:
            await self._advance(flight)
            return True
        except Unavailable as error:
            if not flight.begun:
                raise  # another job is in flight: nothing of this one exists yet
            self._stumble(flight, f"not available: {error}")
        except LeaseLost as error:  # whoever trains now decides about these records
            flight.give_back, flight.decision = True, Decision(False, str(error))
            return await self._attempt(flight)
        except (TrainingError, VerificationError, Conflict) as error:
            flight.begun = True
            if flight.decision is not None and not flight.decision.selected:
                self._stumble(flight, str(error))
            else:
                # The fault lies with this candidate, so repeating it cannot help.
                flight.decision = Decision(False, str(error))
                return await self._attempt(flight)
        except ReefError as error:
            flight.begun = True
            flight.deaths += isinstance(error, WorkerDied)
            self._stumble(flight, f"{type(error).__name__}: {error}")
            if isinstance(error, WorkerDied) and flight.candidate is None and flight.deaths >= DEADLY_BATCH:
                flight.decision = Decision(False, f"the trainer died {flight.deaths} times on this batch: {error}")
        return False

    def _stumble(self, flight: Flight, reason: str) -> None:
        flight.attempts += 1
        self.trouble = reason
        log.warning("scenario %s: %s, attempt %d: %s", self.name, flight.job_id, flight.attempts, reason)
        rejected = flight.decision is not None and not flight.decision.selected
        if flight.attempts >= (1 if flight.impatient else ATTEMPTS) and not rejected:
            flight.give_back = True
            flight.decision = Decision(False, f"given up after {flight.attempts} attempts, last: {reason}")

    async def _advance(self, flight: Flight) -> None:
        candidates = self._services.candidates
        if flight.decision is None or flight.decision.selected:
            if flight.candidate is None:
                assert flight.job is not None
                began = time.perf_counter()
                with span(
                    "training step", scenario=self.name, job_id=flight.job_id, samples=len(flight.job.signal.samples)
                ):
                    flight.candidate = await candidates.train(flight.job, flight.runtime_load_id)
                TRAINING_SECONDS.observe(time.perf_counter() - began)
                flight.begun = True
            if not flight.adopted:
                await candidates.adopt(flight.candidate)
                flight.adopted = flight.begun = True
            if flight.decision is None:
                await self._judge(flight, flight.candidate)
        assert flight.decision is not None
        if flight.decision.selected:
            assert flight.candidate is not None
            with span("publication", scenario=self.name, job_id=flight.job_id):
                await candidates.publish(flight.candidate)
                await self._release(flight, flight.candidate)
        else:
            await self._write_off(flight, flight.decision.reason)

    async def _judge(self, flight: Flight, candidate: Candidate) -> None:
        """Evaluation decides. Whatever it raises rejects (fail closed), unless the engine or the store failed."""
        evaluator = self._services.evaluator
        try:
            flight.evaluation = await evaluator.evaluate(
                candidate, self._services.candidates.sampler(candidate, self.head)
            )
            flight.decision = evaluator.decide(candidate, flight.evaluation)
        except ReefError:
            raise
        except Exception as error:
            log.warning("scenario %s: the evaluation of %s failed", self.name, candidate.job_id, exc_info=True)
            flight.evaluation = Evaluation()
            flight.decision = Decision(False, f"the evaluation failed: {type(error).__name__}: {error}")

    # ------------------------------------------------------------------ endings

    async def _release(self, flight: Flight, candidate: Candidate) -> None:
        """The commit gate: one transaction moves the head; only then may the engines resume."""
        assert flight.evaluation is not None and flight.decision is not None
        if flight.commit is None:
            release = chain.next_release(self.head, candidate, flight.evaluation, time.time())
            release.metrics["pause_mode"] = str(self._services.pause_mode)  # may older KV lie under its tokens?
            flight.commit = Commit(
                commit_id=candidate.job_id,
                scenario=self.name,
                kind=COMMIT_KINDS.get(candidate.origin, CommitKind.TRAINED),
                created_at=release.created_at,
                job_id=candidate.job_id,
                expected_head=self.head.release_id,
                release=release,
                consumed=candidate.consumed,
                algorithm_state=candidate.algorithm_state,
                metrics={**candidate.metrics, "evaluation": flight.evaluation.scores},
            )
        stored = await self._services.storage.commit(flight.commit)
        await self._committed(flight, candidate, stored, flight.decision.reason)

    async def _committed(self, flight: Flight, candidate: Candidate, stored: Commit, reason: str) -> None:
        """The store has moved the head. From here on nothing may fail, only be repeated."""
        assert stored.release is not None and stored.job_id is not None
        self._count_release(flight, stored.release, stored.consumed)
        self.head, self.step = stored.release, stored.step
        self.numbers[self.head.release_id] = self.head.number
        self.outcome = f"released {self.head.release_id}: {reason}"
        log.info("scenario %s: published release %d (%s): %s", self.name, self.head.number, self.head.kind, reason)
        for attempt in range(ATTEMPTS):
            try:
                await self._services.candidates.commit(candidate, self.head)
                break
            except ReefError as error:
                self.trouble = f"committed, but not resumed yet: {error}"
                log.warning("scenario %s: %s is %s", self.name, stored.job_id, self.trouble)
                await asyncio.sleep(0.5 * 2**attempt)
        else:
            log.error("scenario %s: %s is committed; the supervisor must resume the engines", self.name, stored.job_id)
        try:
            await self._services.released()
        except (ReefError, OSError):
            log.warning("what no release needs any more could not be removed", exc_info=True)

    def _count_release(self, flight: Flight, release: Release, consumed: list[Consumption]) -> None:
        label = scenario_label(self.name)
        PUBLICATIONS.labels(label, release.kind).inc()
        count_consumed(self.name, [item.disposition for item in consumed])
        if release.kind is ReleaseKind.TRAINED:
            STEPS.labels(label, "released").inc()
        for sample in flight.job.signal.samples if flight.job is not None else ():
            if (answered := self.numbers.get(sample.release_id or "")) is not None:
                STALENESS.observe(self.head.number - answered)

    async def _write_off(self, flight: Flight, reason: str) -> None:
        """The flight ends without a release: incumbent restored, its records consumed unless it is given back."""
        storage = self._services.storage
        if flight.commit is not None:
            stored = await storage.commit_by_job(flight.job_id)
            if stored is not None and stored.release is not None:  # the store had taken it after all
                flight.decision, flight.give_back = Decision(True, "committed"), False
                assert flight.candidate is not None
                await self._committed(flight, flight.candidate, stored, "committed at the last attempt")
                return
        await self._services.candidates.reject(flight.job_id, reason)
        outcome = "given_back" if flight.give_back else "rejected"
        STEPS.labels(scenario_label(self.name), outcome).inc()
        if flight.give_back:
            self.outcome = reason
            return
        spent = await storage.consumed(self.name, [item.record_id for item in flight.consumed])
        trained = {Disposition.TRAINED: Disposition.REJECTED}
        candidate = flight.candidate
        metrics: dict[str, Any] = {**(candidate.metrics if candidate else {}), "reason": reason}
        if flight.evaluation is not None:
            metrics["evaluation"] = flight.evaluation.scores
        if candidate is not None:
            metrics["candidate"] = {
                "content_id": candidate.content_id,
                "state_id": candidate.state_id,
                "probe_logprobs": candidate.probe_logprobs,
            }
        await self.note(
            CommitKind.REJECTED,
            job_id=flight.job_id,
            consumed=[
                Consumption(item.record_id, trained.get(item.disposition, item.disposition), item.reason)
                for item in flight.consumed
                if item.record_id not in spent
            ],
            metrics=metrics,
            algorithm_state=flight.algorithm_state,
        )
        self.outcome = f"rejected: {reason}"
        log.info("scenario %s: %s was rejected: %s", self.name, flight.job_id, reason)
        if candidate is not None:
            log.info("to publish it anyway: reef promote --scenario %s --job %s", self.name, flight.job_id)

    async def write_off_recovered(self, candidate: Candidate, reason: str) -> None:
        await self._write_off(Flight(candidate.runtime_load_id, candidate=candidate), reason)

    async def note(
        self,
        kind: CommitKind,
        *,
        consumed: list[Consumption],
        metrics: dict[str, Any],
        job_id: str | None = None,
        algorithm_state: dict[str, Any] | None = None,
    ) -> None:
        """A commit that moves no head. Raises StorageError, Conflict."""
        commit = Commit(
            commit_id=job_id or f"commit_{uuid.uuid4().hex}",
            scenario=self.name,
            kind=kind,
            created_at=time.time(),
            job_id=job_id,
            consumed=consumed,
            metrics=metrics,
            algorithm_state=algorithm_state,
        )
        if job_id is not None and await self._services.storage.commit_by_job(job_id) is not None:
            return  # written by an attempt whose answer was lost
        self.step = (await self._services.storage.commit(commit)).step
        count_consumed(self.name, [item.disposition for item in consumed])


def _new_job_id() -> str:
    return f"job_{uuid.uuid4().hex}"
