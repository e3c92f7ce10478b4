"""Handing one device over and back: the order, the acknowledgements, and every hand-over failing in every way."""

from __future__ import annotations

import pytest

from reef.errors import (
    BarrierError,
    EngineError,
    EngineUncertain,
    ReefError,
    TrainingError,
    WorkerDied,
)
from reef.runtime.colocation import Colocation
from reef.runtime.interfaces import BASE_LOAD_ID, MarkerState, MemoryRegion, PauseMode
from reef.runtime.publication import Publication
from reef.runtime.scheduler import TrainingCoordinator
from tests.runtime.fakes import Device, FakeEngines, FakeTrainer
from tests.runtime.test_coordinator import World

HAND_OVER = ("pause", "release_memory", "trainer.restore", "train", "trainer.release", "restore_memory", "resume")


class Colocated(World):
    """A world whose engines and trainer share one device."""

    resident: tuple[MemoryRegion, ...] = ()

    def boot(self) -> None:
        super().boot()
        self.faults.calls.clear()
        self.device = Device()
        self.engines = FakeEngines(self.faults, device=self.device)
        self.trainer = FakeTrainer(self.faults, self.device)
        self.publication = Publication(self.engines, self.contents, PauseMode.RETRACT, "base", list(range(8)))
        self.colocation = Colocation(self.publication, self.trainer, self.resident)
        self.coordinator = TrainingCoordinator(
            self.trainer, self.publication, self.contents, self.marker, self.colocation
        )
        self.colocation.start_trainer(resume=False)

    def repair(self) -> None:
        """What the supervisor does."""
        if self.publication.health() is not None:
            self.coordinator.repair_engines()
        if self.trainer.health() is not None:
            self.coordinator.restart_trainer()

    def serves(self, load: str) -> bool:
        engines = self.engines
        return (
            self.device.holders == {"engines"}
            and engines.lanes["s"] == load
            and load in engines.loads
            and not engines.paused
            and not engines.released
            and self.publication.health() is None
        )


@pytest.fixture
def world(tmp_path) -> Colocated:
    made = Colocated(tmp_path)
    made.recover()
    return made


def order(world: Colocated) -> list[str]:
    return [call for call in world.faults.calls if call in HAND_OVER or call == "start trainer"]


def test_the_first_trainer_starts_on_an_empty_device(world):
    assert order(world) == [
        *("pause", "release_memory", "start trainer", "trainer.release", "restore_memory", "pause"),
        *("pause", "resume"),  # recovery: the engines serve only once they have the committed heads
    ]
    assert world.serves(BASE_LOAD_ID)


def test_a_step_hands_the_device_over_and_back(world):
    world.step("j1", "engine:1")
    world.faults.calls.clear()
    candidate = world.coordinator.train(world.job("j2"), "engine:2")
    assert order(world)[:-1] == [*HAND_OVER[:-1], "pause"] and order(world)[-1] == "resume"
    assert world.serves("engine:1") and "engine:2" in world.engines.loads, "evaluation asks both"
    world.coordinator.publish(candidate)
    world.coordinator.acknowledge("j2", world.commit(candidate))
    assert world.serves("engine:2")
    assert {"engines release", "trainer restore", "trainer release", "engines restore"} == set(world.colocation.reports)


def test_a_resident_base_stays_for_a_step_but_not_for_a_start(tmp_path):
    class Resident(Colocated):
        resident = (MemoryRegion.WEIGHTS,)

    released = []
    world = Resident(tmp_path)
    remember = world.engines.release_memory

    def release(regions):
        released.append(set(regions))
        world.engines.device.leave("engines")
        return remember(regions)

    world.engines.release_memory = release
    world.recover()
    world.step("j1", "engine:1")
    stages = world.faults.calls.count("stage")
    world.coordinator.train(world.job("j2"), "engine:2")
    assert world.faults.calls.count("stage") == stages + 2, "the head is asked for again, and is a no-op"
    assert released == [{MemoryRegion.KV_CACHE}] * 2
    world.trainer.close()
    world.coordinator.reject("j2", "worse")
    world.repair()
    assert released[-1] == {MemoryRegion.KV_CACHE, MemoryRegion.WEIGHTS} and world.serves("engine:1")


@pytest.mark.parametrize("error", [EngineError, EngineUncertain, WorkerDied, BarrierError])
@pytest.mark.parametrize("operation", ["pause", "release_memory"])
def test_engines_that_fail_a_release_are_unusable_until_replaced(world, operation, error):
    world.step("j1", "engine:1")
    world.faults.plant(operation, error("refused"))
    with pytest.raises(error):
        world.coordinator.train(world.job("j2"), "engine:2")
    assert "trainer" not in world.device.holders and world.trainer.trained == ["j1"]
    assert "refused" in (world.publication.health() or "")
    with pytest.raises(EngineUncertain, match="refused"):
        world.coordinator.train(world.job("j2"), "engine:2")
    world.repair()
    assert world.serves("engine:1")
    world.step("j2", "engine:2")
    assert world.serves("engine:2")


@pytest.mark.parametrize("error", [EngineError, EngineUncertain, WorkerDied])
@pytest.mark.parametrize("operation", ["restore_memory", "stage", "activate", "resume"])
def test_a_step_survives_engines_that_cannot_come_back(world, operation, error):
    world.step("j1", "engine:1")
    world.faults.plant(operation, error("no memory"))
    with pytest.raises(EngineUncertain, match="no memory"):  # the candidate is durable, but nobody holds it
        world.coordinator.train(world.job("j2"), "engine:2")
    assert world.state() is MarkerState.CHECKPOINT and world.device.holders != {"trainer"}
    world.repair()
    assert world.serves("engine:1") and world.trainer.trained == ["j1", "j2"]
    candidate = world.coordinator.train(world.job("j2"), "engine:2")
    world.coordinator.publish(candidate)
    world.coordinator.acknowledge("j2", world.commit(candidate))
    assert world.serves("engine:2") and world.trainer.trained == ["j1", "j2"], "nothing is trained twice"


def test_one_engine_that_does_not_acknowledge_is_enough(world):
    world.engines.deaf = {"engine-1"}
    with pytest.raises(EngineUncertain, match="engine-1 did not release kv_cache, weights"):
        world.coordinator.train(world.job("j1"), "engine:1")
    assert world.trainer.trained == [] and world.publication.health() is not None
    world.engines.deaf = set()
    world.repair()
    world.step("j1", "engine:1")
    assert world.serves("engine:1")


@pytest.mark.parametrize("error", [WorkerDied, TrainingError, MemoryError])
def test_a_trainer_that_cannot_take_the_device_is_replaced(world, error):
    world.faults.plant("trainer.restore", error("out of memory"))
    with pytest.raises(WorkerDied, match="out of memory"):
        world.coordinator.train(world.job("j1"), "engine:1")
    assert world.serves(BASE_LOAD_ID) and world.state() is MarkerState.RUNNING
    with pytest.raises(WorkerDied, match="not started"):
        world.coordinator.train(world.job("j1"), "engine:1")
    assert world.serves(BASE_LOAD_ID), "without a trainer nothing is released"
    world.repair()
    world.step("j1", "engine:1")
    assert world.serves("engine:1")


@pytest.mark.parametrize("error", [WorkerDied, TrainingError])
def test_a_trainer_that_keeps_the_device_is_closed_and_its_step_counts(world, error):
    world.faults.plant("trainer.release", error("stuck"))
    world.step("j1", "engine:1")
    assert world.serves("engine:1") and world.trainer.health() is not None
    world.repair()
    world.trainer.deaf = True
    world.step("j2", "engine:2")
    assert world.serves("engine:2") and world.trainer.health() is not None, "unacknowledged is failed"


def test_nobody_gets_the_device_of_a_trainer_that_may_still_live(world):
    world.step("j1", "engine:1")
    for nth in (1, 2):
        world.faults.plant("trainer.release", WorkerDied("no answer"), nth)
        world.faults.plant("close trainer", ReefError("not gone after SIGKILL"), nth)
    with pytest.raises(EngineUncertain, match="still has the device"):
        world.coordinator.train(world.job("j2"), "engine:2")
    with pytest.raises(ReefError, match="SIGKILL"):
        world.coordinator.repair_engines()
    assert world.device.holders == {"trainer"} and world.engines.paused
    world.repair()
    assert world.serves("engine:1")


@pytest.mark.parametrize("error", [TrainingError, WorkerDied])
def test_a_failed_step_ends_with_the_incumbent_serving(world, error):
    world.step("j1", "engine:1")
    world.faults.plant("train", error("loss is nan"))
    with pytest.raises(error):
        world.coordinator.train(world.job("j2"), "engine:2")
    assert world.serves("engine:1")
    assert world.state() is (MarkerState.REJECTED if error is TrainingError else MarkerState.RUNNING)


def test_a_trainer_never_starts_while_the_engines_hold_a_candidate(world):
    candidate = world.coordinator.train(world.job("j1"), "engine:1")
    world.coordinator.publish(candidate)
    assert not world.coordinator.trainer_may_start()
    world.coordinator.acknowledge("j1", world.commit(candidate))
    assert world.coordinator.trainer_may_start()


def test_a_trainer_that_fails_to_start_leaves_the_engines_serving(world):
    world.step("j1", "engine:1")
    world.trainer.close()
    world.faults.plant("start trainer", WorkerDied("no such model"))
    with pytest.raises(WorkerDied, match="no such model"):
        world.coordinator.restart_trainer()
    assert world.serves("engine:1")


@pytest.mark.parametrize("operation", ["pause", "release_memory", "start trainer", "restore_memory"])
def test_a_first_start_that_fails_raises(tmp_path, operation):
    class Faulty(Colocated):
        def __init__(self, path) -> None:
            self.planted = False
            super().__init__(path)

        def boot(self) -> None:
            self.faults.plant(operation, WorkerDied("dead on arrival"))
            super().boot()

    with pytest.raises(WorkerDied, match="dead on arrival"):
        Faulty(tmp_path)
