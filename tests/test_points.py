from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reef import points
from reef.points import Plan, Point, crossing, fired, plan_kill
from reef.runtime.interfaces import MarkerState

SOURCE = Path(points.__file__).parent
CHILD = """
from reef.points import Point, crossing
for _ in range(3):
    with crossing(Point.PAUSE):
        print("inside", flush=True)
    print("outside", flush=True)
"""


def cross(plan_file: Path) -> tuple[int, list[str]]:
    """Exit code and output of a process that crosses one point three times."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={points.ENVIRONMENT_VARIABLE: str(plan_file), "PYTHONPATH": str(SOURCE.parent)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout.split()


def test_the_code_crosses_every_point():
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "points.py")
    states = {Point[f"MARKER_{state.name}"] for state in MarkerState}  # the marker's file names them like this
    assert [point for point in Point if point not in states and f"Point.{point.name}" not in text] == []
    assert {point.component for point in Point} == {"service", "engine", "trainer"}


@pytest.mark.parametrize(
    ("side", "occurrence", "seen"),
    [("before", 1, []), ("after", 1, ["inside"]), ("before", 3, ["inside", "outside"] * 2)],
)
def test_a_plan_kills_once_where_it_says(tmp_path, side, occurrence, seen):
    plan_file = tmp_path / "plan"
    plan_kill(plan_file, Plan(name="a", point=Point.PAUSE, side=side, occurrence=occurrence))
    assert cross(plan_file) == (-signal.SIGKILL, seen)
    assert fired(plan_file).exists() and not plan_file.exists()
    assert cross(plan_file) == (0, ["inside", "outside"] * 3), "it fires once"


def test_a_plan_for_another_point_or_another_process(tmp_path):
    plan_file = tmp_path / "plan"
    plan_kill(plan_file, Plan(name="a", point=Point.RESUME, side="before"))
    assert cross(plan_file)[0] == 0
    victim = subprocess.Popen(["sleep", "60"])
    plan_kill(plan_file, Plan(name="b", point=Point.PAUSE, side="after", occurrence=2, pid=victim.pid))
    assert cross(plan_file)[0] == 0
    assert victim.wait(10) == -signal.SIGKILL


def test_a_process_that_is_stopped_at_a_point_goes_on_from_there(tmp_path):
    plan_file = tmp_path / "plan"
    plan_kill(plan_file, Plan(name="a", point=Point.PAUSE, side="before", signal="SIGSTOP"))
    environment = {points.ENVIRONMENT_VARIABLE: str(plan_file), "PYTHONPATH": str(SOURCE.parent)}
    child = subprocess.Popen([sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and fired(plan_file).exists()
        child.send_signal(signal.SIGCONT)
        assert child.communicate(timeout=240)[0].split() == ["inside", "outside"] * 3
    finally:
        child.kill()


def test_a_block_that_fails_does_not_reach_its_other_side(tmp_path, monkeypatch):
    reached = []
    monkeypatch.setattr(points, "_injection", points.FaultInjection(tmp_path / "plan"))
    monkeypatch.setattr(points.FaultInjection, "reach", lambda self, point, side: reached.append(side))
    with pytest.raises(ValueError, match="inside"), crossing(Point.COMMIT):
        raise ValueError("inside")
    assert reached == ["before"]


def test_nothing_happens_in_a_deployment(monkeypatch):
    monkeypatch.setattr(points, "_injection", None)
    assert crossing(Point.COMMIT) is crossing(Point.HEAD), "no object is made for a crossing"
