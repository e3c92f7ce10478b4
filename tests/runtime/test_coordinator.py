"""The coordinator's states, driven through success, failure, crash and retry with fakes that inject the faults."""

from __future__ import annotations

import pytest

from reef.artifact.content import DirectoryContentStore
from reef.errors import BarrierError, EngineError, TrainingError, Unavailable, VerificationError, WorkerDied
from reef.runtime.interfaces import (
    BASE_LOAD_ID,
    MarkerState,
    Objective,
    PauseMode,
    Release,
    ReleaseKind,
    StepSignal,
    TrainJob,
)
from reef.runtime.publication import Publication
from reef.runtime.recovery import MarkerFile
from reef.runtime.scheduler import TrainingCoordinator
from tests.runtime.fakes import FakeEngines, FakeTrainer, Faults


class World:
    """One data directory; `boot` is a fresh process on it."""

    def __init__(self, path) -> None:
        self.path = path
        self.faults = Faults()
        self.heads = [release(0, BASE_LOAD_ID, "base", None)]
        self.boot()

    def boot(self) -> None:
        self.engines = FakeEngines(self.faults)
        self.trainer = FakeTrainer(self.faults)
        self.contents = DirectoryContentStore(self.path / "artifacts")
        self.publication = Publication(self.engines, self.contents, PauseMode.IN_PLACE, "base", list(range(8)))
        self.marker = MarkerFile(self.path / "marker.json")
        self.coordinator = TrainingCoordinator(self.trainer, self.publication, self.contents, self.marker)

    def recover(self, committed: bool = False):
        return self.coordinator.recover(self.heads, committed)

    def state(self) -> MarkerState:
        found = self.marker.read()
        assert found is not None
        return found.state

    def job(self, job_id: str) -> TrainJob:
        head = self.heads[0]
        return TrainJob(
            job_id=job_id,
            scenario="s",
            step=1,
            signal=StepSignal(objective=Objective("policy_gradient"), samples=[], metrics={"score": 1.0}),
            incumbent_path=None if head.content_id == "base" else str(self.contents.path(head.content_id)),
            state_path=None,
            output_path=str(self.path / "scratch" / job_id),
            probe_ids=list(range(8)),
        )

    def commit(self, candidate) -> Release:
        self.heads = [release(self.heads[0].number + 1, candidate.runtime_load_id, candidate.content_id, candidate)]
        return self.heads[0]

    def step(self, job_id: str, load: str) -> Release:
        candidate = self.coordinator.train(self.job(job_id), load)
        self.coordinator.publish(candidate)
        committed = self.commit(candidate)
        self.coordinator.acknowledge(job_id, committed)
        return committed


def release(number: int, load: str, content: str, candidate) -> Release:
    return Release(
        release_id=f"r{number}",
        scenario="s",
        number=number,
        parent_id=None,
        kind=ReleaseKind.TRAINED,
        content_id=content,
        runtime_load_id=load,
        created_at=0.0,
        metrics={"probe_logprobs": candidate.probe_logprobs} if candidate else {},
    )


@pytest.fixture
def world(tmp_path) -> World:
    made = World(tmp_path)
    made.recover()
    return made


def test_a_step_goes_through_the_gate_in_order(world):
    candidate = world.coordinator.train(world.job("j1"), "engine:1")
    assert world.state() is MarkerState.CHECKPOINT and not world.engines.paused
    assert world.engines.lanes["s"] == BASE_LOAD_ID
    world.coordinator.publish(candidate)
    assert world.state() is MarkerState.READY_TO_COMMIT and world.engines.paused
    world.coordinator.acknowledge("j1", world.commit(candidate))
    assert world.state() is MarkerState.COMPLETE and not world.engines.paused
    assert world.engines.lanes["s"] == "engine:1"
    world.step("j2", "engine:2")
    assert world.engines.lanes["s"] == "engine:2" and not world.engines.paused


def test_nothing_uncommitted_is_ever_served(world):
    world.step("j1", "engine:1")
    candidate = world.coordinator.train(world.job("j2"), "engine:2")
    world.coordinator.publish(candidate)
    world.coordinator.reject("j2", "lost the head")
    assert world.state() is MarkerState.REJECTED and not world.engines.paused
    assert world.engines.lanes["s"] == "engine:1" and "engine:2" not in world.engines.loads
    assert ("s", "engine:2") not in world.engines.served


def test_rejecting_a_checkpoint_never_pauses(world):
    world.coordinator.train(world.job("j1"), "engine:1")
    before = world.faults.calls.count("pause")
    world.coordinator.reject("j1", "worse")
    assert world.faults.calls.count("pause") == before and "engine:1" not in world.engines.loads


def test_a_failed_barrier_retires_the_engines_and_the_retry_publishes_in_full(world):
    candidate = world.coordinator.train(world.job("j1"), "engine:1")
    world.faults.plant("pause", BarrierError("flush refused"))
    with pytest.raises(BarrierError):
        world.coordinator.publish(candidate)
    assert world.state() is MarkerState.UPDATING_WEIGHTS
    for world.engines.trouble in (None, "flush refused", "engine-0 exited"):  # what real engines say of themselves
        said = world.publication.health() or ""
        assert said.startswith("recoverable") and said.count("flush refused") == 1
        assert said.endswith(world.engines.trouble or "flush refused")
    world.engines.trouble = None
    world.coordinator.publish(candidate)
    assert world.publication.health() is None
    assert "restart" in world.faults.calls and world.state() is MarkerState.READY_TO_COMMIT
    world.coordinator.acknowledge("j1", world.commit(candidate))
    assert world.engines.lanes["s"] == "engine:1" and not world.engines.paused


def failed_barrier(world):
    candidate = world.coordinator.train(world.job("j1"), "engine:1")
    world.faults.plant("pause", BarrierError("flush refused"))
    with pytest.raises(BarrierError):
        world.coordinator.publish(candidate)
    return candidate


def test_engines_that_a_repair_replaced_after_a_failed_barrier_are_not_replaced_again(world):
    candidate = failed_barrier(world)
    world.coordinator.repair_engines()
    assert world.engines.paused and world.engines.loads.keys() == {BASE_LOAD_ID}
    world.coordinator.publish(candidate)
    assert world.faults.calls.count("restart") == world.publication.generation == 1
    world.coordinator.acknowledge("j1", world.commit(candidate))
    assert world.engines.lanes["s"] == "engine:1" and not world.engines.paused


@pytest.mark.parametrize("trouble", ["dies", "fails to switch"])
def test_repaired_engines_that_are_not_as_the_repair_left_them_are_replaced_again(world, trouble):
    candidate = failed_barrier(world)
    world.coordinator.repair_engines()
    if trouble == "dies":
        world.engines.trouble = "engine-0 exited"
    else:
        world.faults.plant("activate", EngineError("out of memory"))
        with pytest.raises(EngineError, match="out of memory"):
            world.coordinator.publish(candidate)
    world.coordinator.publish(candidate)
    assert world.faults.calls.count("restart") == 2 and world.state() is MarkerState.READY_TO_COMMIT


def test_a_repair_of_an_earlier_job_renews_nothing(world):
    failed_barrier(world)
    world.coordinator.repair_engines()
    world.coordinator.reject("j1", "given up")
    candidate = world.coordinator.train(world.job("j2"), "engine:2")
    world.faults.plant("pause", BarrierError("flush refused"))
    with pytest.raises(BarrierError):
        world.coordinator.publish(candidate)
    world.coordinator.publish(candidate)
    assert world.faults.calls.count("restart") == 2


def test_an_adapter_that_one_replica_never_applied_fails(world):
    world.engines.unapplied = {"j1"}
    with pytest.raises(VerificationError, match="engine-1"):
        world.coordinator.train(world.job("j1"), "engine:1")
    world.coordinator.reject("j1", "not applied")
    assert world.engines.lanes["s"] == BASE_LOAD_ID and world.state() is MarkerState.REJECTED


def test_a_failed_resume_retries_without_training_or_transfer(world):
    candidate = world.coordinator.train(world.job("j1"), "engine:1")
    world.coordinator.publish(candidate)
    committed = world.commit(candidate)
    world.faults.plant("resume", EngineError("slow"))
    with pytest.raises(EngineError):
        world.coordinator.acknowledge("j1", committed)
    assert world.state() is MarkerState.HEAD_COMMITTED
    stages = world.faults.calls.count("stage")
    world.coordinator.acknowledge("j1", committed)
    assert world.state() is MarkerState.COMPLETE and world.faults.calls.count("stage") == stages
    assert world.trainer.trained == ["j1"]


def test_a_bad_batch_settles_the_marker(world):
    world.faults.plant("train", TrainingError("loss is nan"))
    with pytest.raises(TrainingError, match="nan"):
        world.coordinator.train(world.job("j1"), "engine:1")
    assert world.state() is MarkerState.REJECTED
    world.step("j2", "engine:2")


def test_a_dead_trainer_leaves_running_and_the_same_job_may_train_again(world):
    world.faults.plant("train", WorkerDied("killed"))
    with pytest.raises(WorkerDied):
        world.coordinator.train(world.job("j1"), "engine:1")
    assert world.state() is MarkerState.RUNNING
    assert world.step("j1", "engine:1").runtime_load_id == "engine:1"


def test_one_job_at_a_time(world):
    world.coordinator.train(world.job("j1"), "engine:1")
    with pytest.raises(Unavailable, match="in flight"):
        world.coordinator.train(world.job("j2"), "engine:2")


@pytest.mark.parametrize("state", ["RUNNING", "CHECKPOINT", "UPDATING_WEIGHTS", "READY_TO_COMMIT"])
def test_a_crash_before_the_commit_serves_the_old_head(world, state):
    world.step("j0", "engine:1")
    if state == "RUNNING":
        world.faults.plant("train", WorkerDied("killed"))
        with pytest.raises(WorkerDied):
            world.coordinator.train(world.job("j1"), "engine:2")
    else:
        candidate = world.coordinator.train(world.job("j1"), "engine:2")
        if state == "UPDATING_WEIGHTS":
            world.faults.plant("activate", WorkerDied("killed"))
            with pytest.raises(WorkerDied):
                world.coordinator.publish(candidate)
        elif state == "READY_TO_COMMIT":
            world.coordinator.publish(candidate)
    assert world.state() is MarkerState[state]
    world.boot()
    resumed = world.recover(committed=False)
    assert world.engines.lanes["s"] == "engine:1" and not world.engines.paused
    if state == "RUNNING":
        assert resumed is None and world.state() is MarkerState.REJECTED
        return
    assert resumed is not None and resumed.job_id == "j1"
    world.coordinator.publish(resumed)
    world.coordinator.acknowledge("j1", world.commit(resumed))
    assert world.engines.lanes["s"] == "engine:2" and world.trainer.trained == []


@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_crash_after_the_commit_serves_the_new_head(world, acknowledged):
    candidate = world.coordinator.train(world.job("j1"), "engine:1")
    world.coordinator.publish(candidate)
    committed = world.commit(candidate)
    if acknowledged:
        world.faults.plant("resume", WorkerDied("killed"))
        with pytest.raises(WorkerDied):
            world.coordinator.acknowledge("j1", committed)
    world.boot()
    assert world.recover(committed=True) is None
    assert world.engines.lanes["s"] == "engine:1" and world.state() is MarkerState.COMPLETE


def test_an_ambiguous_step_is_not_replayed_by_a_trainer_that_mutates(world):
    world.faults.plant("train", WorkerDied("killed"))
    with pytest.raises(WorkerDied):
        world.coordinator.train(world.job("j1"), "engine:1")
    world.boot()
    world.trainer.immutable = False
    with pytest.raises(TrainingError, match="mid-step"):
        world.recover()


def test_engines_replaced_behind_the_gate_stay_paused_until_the_commit_decides(world):
    candidate = world.coordinator.train(world.job("j1"), "engine:1")
    world.coordinator.publish(candidate)
    world.coordinator.repair_engines()
    assert world.engines.paused and world.engines.lanes["s"] == BASE_LOAD_ID
    world.coordinator.acknowledge("j1", world.commit(candidate))
    assert world.engines.lanes["s"] == "engine:1" and not world.engines.paused


def test_engines_that_will_not_pause_at_startup_are_replaced_at_once(world):
    world.step("j1", "engine:1")
    candidate = world.coordinator.train(world.job("j2"), "engine:2")
    world.boot()
    world.faults.plant("pause", BarrierError("an old engine"))
    assert world.recover() == candidate
    assert world.faults.calls.count("restart") == 1 and world.publication.health() is None
    assert world.engines.lanes["s"] == "engine:1" and not world.engines.paused
    assert world.state() is MarkerState.CHECKPOINT and "engine:2" in world.engines.loads


def test_engines_replaced_during_evaluation_hold_the_candidate_again(world):
    world.coordinator.train(world.job("j1"), "engine:1")
    world.coordinator.repair_engines()
    assert "engine:1" in world.engines.loads and world.engines.lanes["s"] == BASE_LOAD_ID
    assert not world.engines.paused


def test_engines_restored_in_part_are_never_resumed(world):
    world.step("j1", "engine:1")
    candidate = world.coordinator.train(world.job("j2"), "engine:2")
    world.faults.plant("activate", EngineError("the adapter's file is unreadable"))
    with pytest.raises(EngineError, match="unreadable"):
        world.coordinator.repair_engines()
    assert world.publication.health() is not None, "the supervisor must see it: the engines themselves are fine"
    with pytest.raises(EngineError, match="committed heads"):
        world.coordinator.publish(candidate)
    assert world.engines.paused
    world.coordinator.repair_engines()
    assert world.publication.health() is None and world.engines.lanes["s"] == "engine:1"
