from __future__ import annotations

import pytest

from reef.errors import VerificationError
from reef.runtime.interfaces import BASE_LOAD_ID, Candidate, MarkerState, WeightKind
from reef.runtime.publication import probe_ids, verify_effect
from tests.runtime.test_coordinator import World, world

__all__ = ["world"]


def candidate(expected: list[float], incumbent: list[float]) -> Candidate:
    return Candidate(
        job_id="j",
        scenario="s",
        content_id="c",
        state_id=None,
        kind=WeightKind.LORA,
        runtime_load_id="engine:1",
        probe_logprobs=expected,
        incumbent_probe_logprobs=incumbent,
    )


def test_the_probe_is_fixed_and_within_the_vocabulary():
    assert probe_ids(100) == probe_ids(100) and len(probe_ids(100)) == 64
    assert all(0 <= token_id < 100 for token_id in probe_ids(100))


def test_an_update_smaller_than_the_tolerance_must_still_show():
    moved = candidate([-1.0001, -2.0], [-1.0, -2.0])
    with pytest.raises(VerificationError, match="never applied"):
        verify_effect(moved, served=[[-1.0, -2.0]], incumbent=[[-1.0, -2.0]], tolerance=0.5)
    verify_effect(moved, served=[[-1.00009, -2.0]], incumbent=[[-1.0, -2.0]], tolerance=0.5)


def test_an_engine_that_serves_something_else_fails_on_whichever_replica_it_is():
    moved = candidate([-1.5, -2.0], [-1.0, -2.0])
    good, bad = [-1.5, -2.0], [-1.7, -2.0]
    for served in ([good, bad], [bad, good]):
        with pytest.raises(VerificationError, match="away from the trainer"):
            verify_effect(moved, served=served, incumbent=[[-1.0, -2.0]] * 2, tolerance=0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_fails(value):
    with pytest.raises(VerificationError):
        verify_effect(candidate([-1.5], [-1.0]), served=[[value]], incumbent=[[-1.0]], tolerance=0.1)


def test_a_step_that_moved_nothing_may_serve_the_same():
    verify_effect(candidate([-1.0], [-1.0]), served=[[-1.0]], incumbent=[[-1.0]], tolerance=0.1)


def test_a_lane_that_did_not_switch_fails_the_publication(world: World):
    trained = world.coordinator.train(world.job("j1"), "engine:1")
    world.engines.activate = lambda lane, load: None  # type: ignore[method-assign]
    with pytest.raises(VerificationError, match="lane 's' serves"):
        world.coordinator.publish(trained)
    assert world.state() is MarkerState.UPDATING_WEIGHTS and world.engines.lanes["s"] == BASE_LOAD_ID


def test_a_load_of_other_content_fails_the_publication(world: World):
    trained = world.coordinator.train(world.job("j1"), "engine:1")
    world.engines.loads["engine:1"] = "other"
    with pytest.raises(VerificationError, match="other"):
        world.coordinator.publish(trained)


def test_the_time_of_a_pause_is_known_by_phase(world: World):
    trained = world.coordinator.train(world.job("j1"), "engine:1")
    world.coordinator.publish(trained)
    clock = world.publication.clock
    assert clock.running and clock.newest == {}  # the start was no publication
    world.coordinator.acknowledge("j1", world.commit(trained))
    assert not clock.running
    phases = ["step in progress", "barrier", "switch", "verify", "ready marker", "commit", "head marker", "resume"]
    assert list(clock.newest) == phases and min(clock.newest.values()) >= 0.0
