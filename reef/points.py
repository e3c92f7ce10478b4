"""Named points: every durable write and external effect of Reef, and the fault injection that kills a process there.

The code says where it is with `with crossing(Point.COMMIT):`, which does nothing in a deployment. Only when the
environment variable REEF_FAULT_INJECTION names a file do crossings look for a `Plan` in it. The process that reaches
the planned side of the planned point for the planned time renames the file to `<name>.fired` and sends SIGKILL (or
SIGSTOP, which leaves time to change the world around the point). So a plan fires once, whatever is restarted after it,
and the next one may be written while everything runs.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import msgspec

ENVIRONMENT_VARIABLE = "REEF_FAULT_INJECTION"

Side = Literal["before", "after"]
Signal = Literal["SIGKILL", "SIGSTOP"]


class Point(enum.StrEnum):
    """The first word of a value is the component whose process crosses the point."""

    # The store. "before" is before the transaction begins, "after" is when it is durable and nobody was told.
    APPEND_RECORD = "service.append.record"
    APPEND_REPORT = "service.append.report"
    APPEND_INSTRUCTION = "service.append.instruction"
    CREATE_SCENARIO = "service.create.scenario"
    LOAD_SEQUENCE = "service.load.sequence"
    COMMIT = "service.commit"  # with a release
    WRITE_OFF = "service.write_off"  # a commit without one
    # Inside a commit's transaction, which is not durable on either side.
    HEAD = "service.commit.head"
    CONSUMPTION = "service.commit.consumption"
    # Bytes of weights and optimizer state.
    BLOB = "service.content.blob"
    CHECKPOINT = "service.content.checkpoint"
    RETAIN = "service.content.retain"
    # The coordinator's marker; one point per state that is written.
    MARKER_RUNNING = "service.marker.running"
    MARKER_CHECKPOINT = "service.marker.checkpoint"
    MARKER_UPDATING_WEIGHTS = "service.marker.updating_weights"
    MARKER_READY_TO_COMMIT = "service.marker.ready_to_commit"
    MARKER_HEAD_COMMITTED = "service.marker.head_committed"
    MARKER_COMPLETE = "service.marker.complete"
    MARKER_REJECTING = "service.marker.rejecting"
    MARKER_REJECTED = "service.marker.rejected"
    # What the service does to the other components.
    TRAIN = "service.train"
    STAGE = "service.stage"
    PROBE = "service.probe"
    PAUSE = "service.pause"
    SWITCH = "service.switch"
    VERIFY = "service.verify"
    RESUME = "service.resume"
    DROP = "service.drop"
    RESTORE = "service.restore"
    # Who has the device that a colocated deployment shares.
    MEMORY_RELEASE = "service.memory.release"
    MEMORY_RESTORE = "service.memory.restore"
    GIVE_BACK_DEVICE = "service.memory.give_back"
    TAKE_DEVICE = "service.memory.take"
    RESTART_ENGINES = "service.restart.engines"
    RESTART_TRAINER = "service.restart.trainer"
    # What an engine does when it is told to.
    ENGINE_LOAD = "engine.load"
    ENGINE_UNLOAD = "engine.unload"
    ENGINE_SCORE = "engine.score"
    ENGINE_PAUSE = "engine.pause"
    ENGINE_FLUSH = "engine.flush"
    ENGINE_ACTIVATE = "engine.activate"
    ENGINE_RESUME = "engine.resume"
    ENGINE_RELEASE_MEMORY = "engine.release_memory"
    ENGINE_RESTORE_MEMORY = "engine.restore_memory"
    # What the trainer does when it is told to.
    TRAINER_STEP = "trainer.step"
    TRAINER_WRITE = "trainer.write"
    TRAINER_RELEASE_MEMORY = "trainer.release_memory"
    TRAINER_RESTORE_MEMORY = "trainer.restore_memory"

    @property
    def component(self) -> str:
        """Whose process crosses it: "service", "engine" or "trainer"."""
        return self.value.partition(".")[0]


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """One kill. `pid` 0 is the process that reaches the point; another pid gets the signal in its stead."""

    name: str  # counting starts anew with each name
    point: Point
    side: Side
    occurrence: int = 1
    pid: int = 0
    signal: Signal = "SIGKILL"
    linger: float = 0.0  # seconds between reaching the point and the signal; everybody else goes on meanwhile


def plan_kill(path: Path, plan: Plan) -> None:
    """Put the plan in place of the one before."""
    scratch = path.with_suffix(".partial")
    scratch.write_bytes(msgspec.json.encode(plan))
    scratch.rename(path)


def fired(path: Path) -> Path:
    """The name that a plan's file has after it fired."""
    return path.with_suffix(".fired")


class FaultInjection:
    """Follows the plans in one file. Threads may cross points at the same time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._name = ""
        self._reached = 0

    def reach(self, point: Point, side: Side) -> None:
        if (plan := self._claim(point, side)) is None:
            return
        time.sleep(plan.linger)
        with contextlib.suppress(ProcessLookupError):
            os.kill(plan.pid or os.getpid(), signal.Signals[plan.signal])
        if not plan.pid and plan.signal == "SIGKILL":
            time.sleep(60.0)  # until the signal is delivered

    def _claim(self, point: Point, side: Side) -> Plan | None:
        """The plan, if this is where it fires; nobody else gets it then."""
        with self._lock:
            try:
                plan = msgspec.json.decode(self._path.read_bytes(), type=Plan)
            except FileNotFoundError:
                return None
            if (plan.point, plan.side) != (point, side):
                return None
            if plan.name != self._name:
                self._name, self._reached = plan.name, 0
            self._reached += 1
            if self._reached < plan.occurrence:
                return None
            try:
                self._path.rename(fired(self._path))
            except FileNotFoundError:  # another process was faster
                return None
            return plan


class _Crossing(AbstractContextManager[None]):
    def __init__(self, injection: FaultInjection, points: Iterable[Point]) -> None:
        self._injection = injection
        self._points = points

    def __enter__(self) -> None:
        for point in self._points:
            self._injection.reach(point, "before")

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            for point in self._points:
                self._injection.reach(point, "after")


_NOTHING = nullcontext()
_injection: FaultInjection | None = None


def inject(path: Path | None) -> None:
    """Follow the plans in `path` from now on; None: cross every point untouched."""
    global _injection
    _injection = None if path is None else FaultInjection(path)


def crossing(*points: Point) -> AbstractContextManager[None]:
    """The block does what the points name; "after" is reached when it raised nothing."""
    return _NOTHING if _injection is None else _Crossing(_injection, points)


if _named := os.environ.get(ENVIRONMENT_VARIABLE):
    inject(Path(_named))
    logging.getLogger("reef.points").warning(
        "FAULT INJECTION: this process kills itself or others as %s says; unset %s in a real deployment",
        _named,
        ENVIRONMENT_VARIABLE,
    )
