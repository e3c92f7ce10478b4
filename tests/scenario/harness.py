"""A scenario on the real store, recipe and coordinator; engines and trainer are the fault-injecting fakes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from reef.artifact import chain
from reef.artifact.content import DirectoryContentStore
from reef.recipe.config import RecipeConfig
from reef.recipe.lookup import build_recipe
from reef.records.sqlite import SqliteStorage
from reef.runtime.coordinator import Coordinator
from reef.runtime.deployment import Channel, CoordinatorRuntime, EngineRuntime, LocalChannel
from reef.runtime.interfaces import (
    Candidate,
    CandidateSampler,
    Decision,
    Ending,
    Evaluation,
    Evaluator,
    Generation,
    InferenceRecord,
    MarkerState,
    Release,
    ReportRecord,
    Span,
)
from reef.scenario.candidates import RuntimeCandidateBackend
from reef.scenario.scenario import Scenario
from reef.scenario.steps import Services
from tests.runtime.fakes import FakeEngines, FakeTrainer, Faults, IdleHandler, plan_of


async def unasked(*arguments: object, **named: object) -> str:
    raise AssertionError("nothing should be sampled")


class Verdict(Evaluator):
    """Says what the test tells it to say."""

    def __init__(self) -> None:
        self.selected = True
        self.error: Exception | None = None
        self.asked: list[str] = []

    async def evaluate(self, candidate: Candidate, sampler: CandidateSampler) -> Evaluation:
        self.asked.append(candidate.job_id)
        if self.error is not None:
            raise self.error
        return Evaluation(scores={"mean": 0.5})

    def decide(self, candidate: Candidate, evaluation: Evaluation) -> Decision:
        return Decision(self.selected, "the test says so")


class Harness:
    """One data directory. `boot` is what a service does at start; `stop` is its end, however it came."""

    def __init__(self, path: Path, **recipe: object) -> None:
        self.path = path
        self.faults = Faults()
        self.verdict = Verdict()
        self.recipe = {"batch-size": 2, "min-age": 0.0, **recipe}
        self.released_error: Exception | None = None
        self.others: dict[str, Scenario] = {}

    async def boot(self) -> Harness:
        self.storage = SqliteStorage(self.path / "reef.db")
        await self.storage.open()
        self.contents = DirectoryContentStore(self.path / "artifacts")
        channel = self.channel()
        self.inference = EngineRuntime(channel, IdleHandler)
        self.runtime = CoordinatorRuntime(channel, self.inference)
        await self.runtime.start()
        self.services = services = Services(
            storage=self.storage,
            contents=self.contents,
            candidates=RuntimeCandidateBackend(self.runtime, unasked),
            recipe=build_recipe(msgspec.convert(self.recipe, RecipeConfig)),
            evaluator=self.verdict,
            turn=asyncio.Lock(),
            scratch=self.path / "candidates",
            base_content_id="base",
            probe_ids=list(range(8)),
            released=self._released,
        )
        state = await self.storage.create_scenario(chain.base_release("s", "base", 1.0))
        recovered = await self.runtime.recover(self.storage)
        self.scenario = Scenario(state, services)
        await self.scenario.start(recovered)
        return self

    def channel(self) -> Channel:
        """To a coordinator with engines of its own."""
        self.engines, self.trainer = FakeEngines(self.faults), FakeTrainer(self.faults)
        coordinator = Coordinator(plan_of(self.path, self.engines, self.trainer))
        self.marker = coordinator._training._marker
        return LocalChannel(coordinator)

    async def _released(self) -> None:
        if self.released_error is not None:
            raise self.released_error

    async def another(self, name: str) -> Scenario:
        """A second scenario of the same deployment."""
        state = await self.storage.create_scenario(chain.base_release(name, "base", 1.0))
        await self.runtime.remember(state.head)
        self.others[name] = Scenario(state, self.services)
        await self.others[name].start()
        return self.others[name]

    def state(self) -> MarkerState:
        found = self.marker.read()
        assert found is not None
        return found.state

    async def stop(self) -> None:
        await self.scenario.close()
        await self.runtime.close()
        await self.storage.close()

    async def feedback(self, name: str, score: float | None, scenario: str = "s", **fields: object) -> None:
        """One exchange under the current head, and a report about it."""
        target = self.others.get(scenario, self.scenario)
        await self.storage.append(self.exchange(name, target, **fields))
        report = ReportRecord(
            record_id=f"report-{name}", scenario=scenario, created_at=time.time(), references=[name], score=score
        )
        await target.report(report)

    def exchange(
        self, name: str, scenario: Scenario | None = None, ending: Ending = Ending.STOP, release_id: str | None = None
    ) -> InferenceRecord:
        scenario = scenario or self.scenario
        head: Release = scenario.head
        generation = Generation(
            prompt_ids=[1, 2, 3],
            output_ids=[4, 5],
            logprobs=[-0.5, -0.25],
            sampled_logprobs=[-0.5, -0.25],
            spans=[Span(0, 2, head.runtime_load_id)],
            ending=ending,
        )
        return InferenceRecord(
            record_id=name,
            scenario=scenario.name,
            created_at=time.time(),
            route="/v1/chat/completions",
            request=b"{}",
            response=b"{}",
            status=200,
            release_id=release_id or head.release_id,
            generations=[generation],
        )

    async def until(self, condition, seconds: float = 100.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"still waiting; status {await self.scenario.status()}"
            await asyncio.sleep(0.01)

    async def released(self, number: int) -> None:
        await self.until(lambda: self.scenario.head.number >= number and not self.engines.paused)


async def teach(reef: Harness, *names: str) -> None:
    """Feedback on one exchange for each name, with scores 0, 1, 0, 1, ..."""
    for index, name in enumerate(names):
        await reef.feedback(name, float(index % 2))
