"""Random interleavings of success, failure, death and retry: coordinator, marker, commit and recovery on a real store.

Every named point may raise what the real thing raises there, or be where the process dies. A death is an exception
that nobody catches, after which every point raises it again: nothing durable happens until the next boot.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
import types
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from reef import points
from reef.artifact import chain
from reef.artifact.content import DirectoryContentStore
from reef.errors import (
    BarrierError,
    EngineError,
    EngineUncertain,
    ReefError,
    StorageError,
    TrainingError,
    VerificationError,
    WorkerDied,
)
from reef.points import Point, Side
from reef.records.sqlite import SqliteStorage
from reef.runtime.coordinator import Coordinator
from reef.runtime.deployment import CoordinatorRuntime, EngineRuntime, LocalChannel
from reef.runtime.interfaces import (
    BASE_LOAD_ID,
    Batch,
    Candidate,
    Commit,
    CommitKind,
    Consumption,
    Disposition,
    InferenceRecord,
    MarkerState,
    Objective,
    ReleaseKind,
    StepSignal,
)
from reef.runtime.recovery import MarkerFile
from reef.runtime.scheduler import SETTLED
from reef.scenario import steps
from reef.scenario.candidates import RuntimeCandidateBackend
from reef.scenario.steps import Services, Steps
from tests.conftest import examples
from tests.runtime.fakes import Device, FakeEngines, FakeTrainer, Faults, IdleHandler, plan_of
from tests.scenario.harness import Verdict, unasked

SCENARIOS = ("s", "t")
FLIGHT_SECONDS = 30.0
COMMITS = (Point.COMMIT, Point.WRITE_OFF)
MARKERS = tuple(Point[f"MARKER_{state.name}"] for state in MarkerState)
ENGINES = (Point.STAGE, Point.SWITCH, Point.RESUME, Point.DROP, Point.RESTORE)
TRAINERS = (Point.TRAIN, Point.TAKE_DEVICE, Point.GIVE_BACK_DEVICE)
MEMORY = (Point.MEMORY_RELEASE, Point.MEMORY_RESTORE, Point.TAKE_DEVICE, Point.GIVE_BACK_DEVICE, Point.RESTART_TRAINER)
REACHABLE = (*COMMITS, *MARKERS, *ENGINES, Point.LOAD_SEQUENCE, Point.BLOB, Point.CHECKPOINT, Point.RETAIN, Point.TRAIN,
             Point.PROBE, Point.PAUSE, Point.VERIFY, Point.RESTART_ENGINES)  # fmt: skip

# What may be raised where; on the side "after" the effect has happened.
RAISES: dict[tuple[Point, Side], tuple[type[ReefError], ...]] = {
    **{(point, side): (StorageError,) for point in (*COMMITS, *MARKERS, Point.BLOB, Point.CHECKPOINT)
       for side in ("before", "after")},
    **{(point, "before"): (EngineError, EngineUncertain, WorkerDied) for point in ENGINES},
    **{(point, "after"): (EngineUncertain, WorkerDied) for point in ENGINES},
    (Point.PROBE, "before"): (VerificationError, WorkerDied),
    (Point.VERIFY, "before"): (VerificationError, WorkerDied),
    (Point.PAUSE, "before"): (BarrierError, WorkerDied),
    (Point.PAUSE, "after"): (BarrierError, WorkerDied),
    (Point.RESTART_ENGINES, "before"): (WorkerDied,),
    (Point.RESTART_ENGINES, "after"): (WorkerDied,),
    (Point.TRAIN, "before"): (TrainingError, StorageError, WorkerDied),
    (Point.TRAIN, "after"): (WorkerDied,),
    (Point.RETAIN, "before"): (StorageError,),
    **{(point, side): (EngineError, EngineUncertain, WorkerDied) for side in ("before", "after")
       for point in (Point.MEMORY_RELEASE, Point.MEMORY_RESTORE)},
    **{(point, side): (TrainingError, WorkerDied) for side in ("before", "after")
       for point in (Point.TAKE_DEVICE, Point.GIVE_BACK_DEVICE)},
    (Point.RESTART_TRAINER, "before"): (WorkerDied,),
}  # fmt: skip


class Death(BaseException):
    """The process is gone; nobody may catch it."""


class Unwatched(Coordinator):
    """Its engines are replaced when a rule says so."""

    def supervise(self) -> None: ...


@dataclass(frozen=True)
class Fault:
    """Raised at the `nth` crossing of the point's side, and at the `times` - 1 after it."""

    point: Point
    side: Side
    error: type[BaseException]
    nth: int
    times: int


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Any point as likely as any other; there, a death as likely as any error."""
    point, side = draw(st.sampled_from((*REACHABLE, *MEMORY))), draw(st.sampled_from(("before", "after")))
    error = draw(st.sampled_from((Death, *RAISES.get((point, side), ()))))
    return Fault(point, side, error, draw(st.integers(1, 2)), draw(st.sampled_from((1, 1, 6))))


PLANS = st.lists(faults(), min_size=1, max_size=4)


class Injection(points.FaultInjection):
    """Raises instead of killing."""

    def __init__(self) -> None:
        self.dead = False
        self.engines: MortalEngines | None = None
        self.trainer: FakeTrainer | None = None
        self.plan: list[Fault] = []
        self._seen: Counter[tuple[Point, Side]] = Counter()

    def arm(self, plan: list[Fault]) -> None:
        self.dead, self.plan = False, plan
        self._seen.clear()

    def reach(self, point: Point, side: Side) -> None:
        if threading.current_thread().name == "reef-writer":
            return  # the store's own thread must live; `MortalStorage` crosses the point for it
        if self.dead:
            raise Death
        self._seen[point, side] += 1
        for fault in self.plan:
            due = fault.nth <= self._seen[point, side] < fault.nth + fault.times
            if due and (fault.point, fault.side) == (point, side):
                if fault.error is Death:
                    self.dead = True
                if issubclass(fault.error, WorkerDied):
                    self._die(point)
                raise fault.error(f"planted {side} {point}")

    def _die(self, point: Point) -> None:
        """Whoever answers at this point is gone, and holds nothing any more."""
        if point in TRAINERS and self.trainer is not None:
            self.trainer.close()
        elif self.engines is not None and point is not Point.RESTART_TRAINER:
            self.engines.dead = True


class MortalStorage(SqliteStorage):
    """Crosses the commit's points on the caller's thread, and keeps `heads` as the store has them."""

    def __init__(self, path: Path, heads: dict[str, str]) -> None:
        super().__init__(path)
        self._heads = heads

    async def commit(self, commit: Commit) -> Commit:
        with points.crossing(Point.WRITE_OFF if commit.release is None else Point.COMMIT):
            stored = await super().commit(commit)
            if commit.release is not None:
                self._heads[commit.scenario] = commit.release.runtime_load_id
        return stored

    async def next_load_sequence(self) -> int:
        with points.crossing(Point.LOAD_SEQUENCE):
            return await super().next_load_sequence()


class MortalEngines(FakeEngines):
    """Once dead, every call fails until they are replaced. Refuses to serve anything but the heads."""

    def __init__(self, heads: dict[str, str], device: Device) -> None:
        super().__init__(Faults(), slots=len(SCENARIOS) + 1, device=device)
        self._heads = heads
        self.dead = False
        self.faults.hit = self._hit  # type: ignore[method-assign]

    def _hit(self, operation: str) -> None:
        if self.dead and operation not in ("restart", "close engines", "close resources"):
            raise WorkerDied("the engine is dead")

    def resume(self) -> None:
        super().resume()
        served = {name: self.lanes.get(name, BASE_LOAD_ID) for name in self._heads}
        assert served == self._heads, "resumed with another load than a committed head"

    def score(self, runtime_load_id: str, token_ids: list[int]) -> list[list[float]]:
        self._hit("score")
        return super().score(runtime_load_id, token_ids)

    def restart(self) -> None:
        super().restart()
        self.dead = False

    def health(self) -> str | None:
        return "the engine is dead" if self.dead else None


class Waiting(types.SimpleNamespace):
    """`asyncio` for the module that waits between attempts."""

    machine: Interleavings

    async def sleep(self, seconds: float) -> None:
        await self.machine.pause_between_attempts(seconds)


waiting = Waiting(Lock=asyncio.Lock)


class Interleavings(RuleBasedStateMachine):
    """One data directory. `self.scenarios` are the steps of the service that runs now."""

    colocated = False

    @initialize()
    def begin(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="reef-interleavings-"))
        self.runner = asyncio.Runner()
        self.injection = Injection()
        points._injection = self.injection
        self.heads = dict.fromkeys(SCENARIOS, BASE_LOAD_ID)  # what the store has: runtime load IDs
        self.names = 0
        self.waits = 0
        waiting.machine = self
        self.storage: MortalStorage | None = None
        self.boot([])

    def teardown(self) -> None:
        points._injection = None
        if hasattr(self, "runner"):
            self.injection.arm([])
            self.runner.run(self._shut())
            self.runner.close()
            shutil.rmtree(self.path)

    # ------------------------------------------------------------------ what happens

    @rule(scenario=st.sampled_from(SCENARIOS), size=st.integers(1, 3), selected=st.booleans(), plan=PLANS)
    def learn(self, scenario: str, size: int, selected: bool, plan: list[Fault]) -> None:
        self.verdict.selected = selected
        self._survive(self._learn(scenario, size), plan)

    @precondition(lambda self: any(binding.head.number for binding in self.scenarios.values()))
    @rule(scenario=st.sampled_from(SCENARIOS), plan=PLANS)
    def roll_back(self, scenario: str, plan: list[Fault]) -> None:
        self._survive(self._roll_back(scenario), plan)

    @rule(scenario=st.sampled_from(SCENARIOS))
    def learn_in_peace(self, scenario: str) -> None:
        self.verdict.selected = True
        before = self.scenarios[scenario].head.number
        self._survive(self._learn(scenario, 1), [])
        assert self.scenarios[scenario].head.number == before + 1, "nothing was in the way"

    @rule(plan=PLANS)
    def engine_dies(self, plan: list[Fault]) -> None:
        self.engines.dead = True
        self._survive(asyncio.sleep(0), plan)

    @rule(plan=PLANS)
    def trainer_dies(self, plan: list[Fault]) -> None:
        self.trainer.close()
        self._survive(asyncio.sleep(0), plan)

    @rule(plan=PLANS)
    def boot(self, plan: list[Fault]) -> None:
        """The service dies while it is idle and starts again; it may die while it recovers."""
        self.injection.arm(plan)
        try:
            recovered = self.runner.run(self._boot())
        except (Death, ReefError):  # a start that fails is reported and repeated by whoever started it
            self.injection.arm([])
            recovered = self.runner.run(self._boot())
        if recovered is not None:
            self._survive(self.scenarios[recovered.scenario].run(Steps.recovered(recovered)), self.injection.plan)

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "runner"):
            return
        self.injection.arm([])
        self.runner.run(self._check())

    async def _check(self) -> None:
        assert self.storage is not None
        assert not self.engines.paused and not self.engines.dead, "the engines are left without a way forward"
        assert self.trainer.health() is None, "nobody replaced the trainer"
        assert not self.engines.released and (not self.colocated or self.device.holders == {"engines"})
        marker = self.marker.read()
        if marker is not None:
            assert marker.state in SETTLED, f"nobody goes on with {marker.state}"
            commit = await self.storage.commit_by_job(marker.job_id)
            released = commit is not None and commit.release is not None
            assert released == (marker.state is MarkerState.COMPLETE), "marker and store disagree"
        for name in SCENARIOS:
            state = await self.storage.scenario(name)
            assert state is not None
            head = state.head
            assert self.scenarios[name].head.release_id == head.release_id
            assert self.engines.lanes.get(name, BASE_LOAD_ID) == head.runtime_load_id, "serves another than the head"
            await self._check_chain(name)

    async def _check_chain(self, name: str) -> None:
        assert self.storage is not None
        releases = (await self.storage.releases(name, limit=1000))[::-1]
        assert [release.number for release in releases] == list(range(len(releases)))
        assert [release.parent_id for release in releases[1:]] == [release.release_id for release in releases[:-1]]
        commits = await self.storage.commits(name, limit=1000)
        assert sum(commit.release is not None for commit in commits) == len(releases) - 1
        consumed = [item.record_id for commit in commits for item in commit.consumed]
        assert len(consumed) == len(set(consumed)), "a record was consumed twice"
        trained = [
            item.record_id for commit in commits if commit.kind is CommitKind.TRAINED for item in commit.consumed
        ]
        batches = [set(batch) for job, batch in self.trainer_saw if job in {commit.job_id for commit in commits}]
        assert set(trained) <= set().union(*batches), "a record counts as trained that no trainer saw"

    # ------------------------------------------------------------------ how

    def _survive(self, work, plan: list[Fault]) -> None:
        """Do it; if the process dies of it, or the wish is refused, the next one takes over."""
        try:
            with contextlib.suppress(ReefError):
                self._run(work, plan)
        except Death:
            self.boot([])

    def _run(self, work, plan: list[Fault]) -> None:
        self.injection.arm(plan)
        self.runner.run(asyncio.wait_for(self._supervised(work), FLIGHT_SECONDS))

    async def _supervised(self, work) -> None:
        """While the work waits (`pause_between_attempts`) and once it has ended, dead engines are replaced."""
        error: ReefError | None = None
        try:
            await work
        except ReefError as refused:  # or given back; what was half done has been ended
            error = refused
        while True:
            if self.publication.health() is not None or self.coordinator._training.owes_seconds > 0.0:
                await self._repair()
            elif self.trainer.health() is not None:
                await self._replace_trainer()
            else:
                break
        if error is not None:
            raise error

    async def pause_between_attempts(self, seconds: float) -> None:
        """Stands in for `asyncio.sleep` between two attempts: the supervisor comes first, or just too late."""
        self.waits += 1
        if self.waits % 2 and self.publication.health() is not None:
            await self._repair()
        elif self.waits % 2 and self.coordinator._training.trainer_may_start():
            await self._replace_trainer()

    async def _replace_trainer(self) -> None:
        with contextlib.suppress(ReefError):  # tried again, once the engines that failed at it are replaced
            await asyncio.to_thread(self.coordinator._training.restart_trainer)

    async def _repair(self) -> None:
        with contextlib.suppress(ReefError):  # tried again
            await asyncio.to_thread(self.coordinator._training.repair_engines)
            await self.inference.follow()

    async def _shut(self) -> None:
        if self.storage is not None:
            await self.runtime.close()
            await self.storage.close()
            self.storage = None

    async def _boot(self) -> Candidate | None:
        await self._shut()
        self.device = Device()
        self.engines = MortalEngines(self.heads, self.device)
        self.trainer = FakeTrainer(Faults(), self.device if self.colocated else None)
        self.injection.engines, self.injection.trainer = self.engines, self.trainer
        self.trainer_saw: list[tuple[str, list[str]]] = getattr(self, "trainer_saw", [])
        self.verdict = Verdict()
        self.storage = MortalStorage(self.path / "reef.db", self.heads)
        await self.storage.open()
        self.contents = DirectoryContentStore(self.path / "artifacts")
        self.marker = MarkerFile(self.path / "marker.json")
        self.coordinator = Unwatched(plan_of(self.path, self.engines, self.trainer, colocate=self.colocated))
        self.publication = self.coordinator._publication
        channel = LocalChannel(self.coordinator)
        self.inference = EngineRuntime(channel, IdleHandler)
        self.runtime = CoordinatorRuntime(channel, self.inference)
        await self.runtime.start()
        states = [await self.storage.create_scenario(chain.base_release(name, "base", 1.0)) for name in SCENARIOS]
        self.services = self._services()
        self.scenarios = {state.scenario: Steps(state, self.services) for state in states}
        return await self._recover()

    async def _recover(self) -> Candidate | None:
        """What `Deployment._recover` does."""
        assert self.storage is not None
        recovered = await self.runtime.recover(self.storage)
        marker = await self.runtime.marker()
        commit = await self.storage.commit_by_job(marker.job_id) if marker else None
        if marker and commit is None and marker.state is MarkerState.REJECTED and marker.candidate:
            await self.scenarios[marker.scenario].write_off_recovered(marker.candidate, "rejected before a restart")
        return recovered

    def _services(self) -> Services:
        async def released() -> None: ...

        assert self.storage is not None
        return Services(
            storage=self.storage,
            contents=self.contents,
            candidates=RuntimeCandidateBackend(self.runtime, unasked),
            recipe=None,  # type: ignore[arg-type]  # steps never ask it
            evaluator=self.verdict,
            turn=asyncio.Lock(),
            scratch=self.path / "candidates",
            base_content_id="base",
            probe_ids=list(range(8)),
            released=released,
        )

    async def _learn(self, scenario: str, size: int) -> None:
        """One step on what was never consumed, new records among it."""
        assert self.storage is not None
        for _ in range(size):
            self.names += 1
            await self.storage.append(_record(scenario, f"{scenario}{self.names}"))
        every = [f"{scenario}{number}" for number in range(1, self.names + 1)]
        present = await self.storage.get(scenario, every)
        fresh = [name for name in present if name not in await self.storage.consumed(scenario, every)]
        batch = Batch(samples=[], consumed=[Consumption(name, Disposition.TRAINED) for name in fresh], metrics={})
        signal = StepSignal(objective=Objective("policy_gradient"), samples=[])
        flight = await self.scenarios[scenario].from_batch(batch, signal, {"names": self.names})
        self.trainer_saw.append((flight.job_id, fresh))
        await self.scenarios[scenario].run(flight)

    async def _roll_back(self, scenario: str) -> None:
        assert self.storage is not None
        binding = self.scenarios[scenario]
        releases = await self.storage.releases(scenario, limit=1000)
        await binding.by_hand(chain.rollback_target(releases, binding.head), ReleaseKind.ROLLBACK)


def _record(scenario: str, name: str) -> InferenceRecord:
    return InferenceRecord(
        record_id=name,
        scenario=scenario,
        created_at=1.0,
        route="/v1/chat/completions",
        request=b"{}",
        response=b"{}",
        status=200,
        release_id=None,
        generations=[],
    )


class ColocatedInterleavings(Interleavings):
    """Engines and trainer share one device, and every hand-over of it may fail or be where the process dies."""

    colocated = True


@pytest.mark.parametrize("machine", [Interleavings, ColocatedInterleavings])
def test_random_interleavings(monkeypatch, machine):
    monkeypatch.setattr(steps, "asyncio", waiting)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(12),
            stateful_step_count=15,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
