from __future__ import annotations

import pytest

from reef.runtime.pause_clock import PauseClock


@pytest.fixture
def now(monkeypatch):
    times = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: times[0])
    return times


def test_phases_add_up_to_the_pause(now):
    clock = PauseClock()
    assert not clock.running
    now[0] = 10.0
    clock.start()
    assert clock.running
    for time, phase in ((13.0, "barrier"), (14.0, "switch"), (16.0, "verify"), (16.5, "switch")):
        now[0] = time
        clock.lap(phase)
    clock.split("barrier", "step in progress", 2.5)
    assert clock.newest == {}
    clock.stop()
    assert clock.newest == {"step in progress": 2.5, "barrier": 0.5, "switch": 1.5, "verify": 2.0}
    assert not clock.running


def test_a_part_is_never_longer_than_its_phase(now):
    clock = PauseClock()
    clock.start()
    now[0] = 1.0
    clock.lap("barrier")
    clock.split("barrier", "step in progress", 5.0)
    clock.split("switch", "nothing", 5.0)
    clock.stop()
    assert clock.newest == {"step in progress": 1.0, "barrier": 0.0}


def test_nothing_is_measured_while_nothing_is_paused(now):
    clock = PauseClock()
    clock.lap("commit")
    clock.stop()
    clock.start()
    clock.stop()
    assert clock.newest == {}
