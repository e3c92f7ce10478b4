"""One workload: its records, its trainer and its release chain, and the order in which a step becomes a release."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

from reef.artifact import chain
from reef.errors import Conflict, NotFound, Unavailable
from reef.metrics import STEPS, scenario_label
from reef.runtime.interfaces import (
    Batch,
    Candidate,
    CommitKind,
    Consumption,
    InferenceRecord,
    InstructionRecord,
    Release,
    ReleaseKind,
    ReportRecord,
    ScenarioState,
)
from reef.runtime.scheduler import RuntimeScheduler
from reef.scenario.steps import Flight, Services, Steps

log = logging.getLogger("reef.scenario")

INGEST_LIMIT = 500


class Scenario:
    """Binds records, recipe, runtime and chain. `head` is always the committed release that serves."""

    def __init__(self, state: ScenarioState, services: Services) -> None:
        self.name = state.scenario
        self.recipe = services.recipe
        self._services = services
        self._steps = Steps(state, services)
        self._processor = services.recipe.processor(state.algorithm_state)
        self._cursor = 0
        self._recovered: Candidate | None = None
        self._forced = False
        self._scheduler = RuntimeScheduler(self.name, self._due, self._learn, services.turn)

    @property
    def head(self) -> Release:
        return self._steps.head

    # ------------------------------------------------------------------ life

    async def start(self, recovered: Candidate | None = None) -> None:
        """Begin learning; `recovered` is the candidate of an interrupted job, evaluated and published first."""
        for release in await self._services.storage.releases(self.name, limit=10_000):
            self._steps.numbers[release.release_id] = release.number
        self._recovered = recovered
        if self._processor is not None or recovered is not None:
            self._scheduler.start()

    async def close(self) -> None:
        await self._scheduler.close()

    def follow(self, state: ScenarioState) -> None:
        """Another process committed `state`, and the engines serve its head. Call with the turn held."""
        self._steps.head, self._steps.step = state.head, state.step
        self._steps.numbers[state.head.release_id] = state.head.number

    async def take_over(self, state: ScenarioState) -> None:
        """Begin to learn from what the store holds, whatever was known before; another process did until now."""
        releases = await self._services.storage.releases(self.name, limit=10_000)
        self._steps.numbers = {release.release_id: release.number for release in releases}
        self._processor = self.recipe.processor(state.algorithm_state)
        self._cursor, self._forced, self._recovered = 0, False, None

    async def write_off_recovered(self, candidate: Candidate, reason: str) -> None:
        """A candidate was rejected just before the service died: consume its records now. Call before `start`."""
        await self._steps.write_off_recovered(candidate, reason)

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
        self._require_turn_here()
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
            "step": self._steps.step,
            "head": {
                "release_id": self.head.release_id,
                "number": self.head.number,
                "kind": self.head.kind,
                "runtime_load_id": self.head.runtime_load_id,
            },
            "recipe": self.recipe.name,
            "counts": await self._services.storage.counts(self.name),
            "waiting": self._processor.counts() if self._processor is not None else {},
            "in_flight": self._steps.in_flight,
            "last_outcome": self._steps.outcome,
            "error": self._steps.trouble or self._scheduler.error,
        }

    async def _eligibility(self) -> dict[str, int]:
        counts = Counter(await self._services.storage.counts(self.name))
        if self._processor is not None:
            counts.update({f"waiting.{reason}": number for reason, number in self._processor.counts().items()})
        return dict(counts)

    # ------------------------------------------------------------------ chain by hand

    async def rollback(self, release_id: str | None = None) -> Release:
        """Publish the content of an earlier release, by id or number, as a new release.

        The default is the version before the head's.

        Waits for a step in flight. Raises NotFound, Conflict, Unavailable.
        """
        return await asyncio.shield(asyncio.create_task(self._rollback(release_id)))

    def _require_turn_here(self) -> None:
        """Raises Unavailable where another process trains."""
        if reason := self._services.elsewhere():
            raise Unavailable(reason)

    async def _rollback(self, release_id: str | None) -> Release:
        async with self._services.turn:
            self._require_turn_here()
            releases = await self._services.storage.releases(self.name, limit=10_000)
            by_number = {str(release.number): release.release_id for release in releases}
            wanted = by_number.get(release_id, release_id) if release_id is not None else None
            target = chain.rollback_target(releases, self.head, wanted)
            return await self._steps.by_hand(target, ReleaseKind.ROLLBACK)

    async def promote(self, source: str) -> Release:
        """Publish by hand a release's content, or the candidate of a rejected job, as a new release."""
        return await asyncio.shield(asyncio.create_task(self._promote(source)))

    async def _promote(self, source: str) -> Release:
        async with self._services.turn:
            self._require_turn_here()
            release = await self._services.storage.release(self.name, source)
            return await self._steps.by_hand(release or await self._rejected(source), ReleaseKind.PROMOTED)

    async def _rejected(self, job_id: str) -> Release:
        """A rejected candidate in the shape of a release. Raises NotFound."""
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

    # ------------------------------------------------------------------ learning

    async def _due(self) -> bool:
        if self._services.elsewhere():
            return False
        if self._recovered is not None:
            return True
        if self._processor is None:
            return False
        await self._ingest()
        await self._discard(self._processor.expire(self.head.number, time.time(), self._steps.numbers))
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
            await self._steps.note(CommitKind.DISCARDED, consumed=discarded, metrics={"reasons": dict(reasons)})

    async def _learn(self) -> None:
        """One step, with the turn held: a batch, a candidate, a judgement, and a release or a rejection."""
        if self._services.elsewhere():  # since the turn was asked for
            return
        recovered, self._recovered = self._recovered, None
        flight = Steps.recovered(recovered) if recovered is not None else await self._begin()
        if flight is None:
            return
        await self._steps.run(flight)
        if self._processor is not None:
            done = Batch(samples=[], consumed=flight.consumed, metrics={})
            self._processor.acknowledge(flight.batch or done)

    async def _begin(self) -> Flight | None:
        assert self._processor is not None
        self._forced = False
        batch = self._processor.build(time.time())
        if not batch.samples and not batch.consumed:
            return None
        if batch.signal and batch.samples:
            return await self._steps.from_batch(batch, self.recipe.prepare(batch), self._processor.state())
        await self._steps.note(
            CommitKind.NO_SIGNAL,
            consumed=batch.consumed,
            metrics={**batch.metrics, "outcome": "no signal"},
            algorithm_state=self._processor.state(),
        )
        self._processor.acknowledge(batch)
        self._steps.outcome = "no signal"
        STEPS.labels(scenario_label(self.name), "no_signal").inc()
        log.info(
            "scenario %s: no signal in %d reports: every score equals what it is compared with",
            self.name,
            int(batch.metrics.get("reports", 0)),
        )
        return None
