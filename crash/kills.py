"""What is killed, where, and what has to happen for the point to be reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from reef.points import Point, Side

Component = Literal["service", "engine", "trainer"]
Trigger = Literal["load", "instruction", "scenario", "rollback", "engine dies", "trainer dies", "restart"]
"""What makes the deployment reach the point: the clients' load alone, or something done once after arming."""

SIDES: tuple[Side, ...] = get_args(Side)

TRIGGERS: dict[Point, Trigger] = {
    Point.APPEND_INSTRUCTION: "instruction",
    Point.CREATE_SCENARIO: "scenario",
    Point.RESTORE: "restart",
    Point.RESTART_ENGINES: "engine dies",
    Point.RESTART_TRAINER: "trainer dies",
}
ONLY_RETRACT = {Point.ENGINE_FLUSH}
ONLY_COLOCATED = {
    Point.MEMORY_RELEASE,
    Point.MEMORY_RESTORE,
    Point.TAKE_DEVICE,
    Point.GIVE_BACK_DEVICE,
    Point.ENGINE_RELEASE_MEMORY,
    Point.ENGINE_RESTORE_MEMORY,
    Point.TRAINER_RELEASE_MEMORY,
    Point.TRAINER_RESTORE_MEMORY,
}

# Where the service stands when somebody else dies.
ENGINE_DIES_AT = (
    Point.TRAIN,
    Point.MARKER_CHECKPOINT,
    Point.STAGE,
    Point.PROBE,
    Point.PAUSE,
    Point.MARKER_UPDATING_WEIGHTS,
    Point.SWITCH,
    Point.VERIFY,
    Point.MARKER_READY_TO_COMMIT,
    Point.COMMIT,
    Point.MARKER_HEAD_COMMITTED,
    Point.RESUME,
    Point.DROP,
    Point.MARKER_REJECTING,
)
TRAINER_DIES_AT = (Point.MARKER_RUNNING, Point.TRAIN, Point.MARKER_CHECKPOINT, Point.COMMIT, Point.MARKER_COMPLETE)
HAND_OVERS = (Point.MEMORY_RELEASE, Point.TAKE_DEVICE, Point.GIVE_BACK_DEVICE, Point.MEMORY_RESTORE)  # of both workers
ROLLBACK_DIES_AT = (Point.MARKER_CHECKPOINT, Point.PAUSE, Point.MARKER_READY_TO_COMMIT, Point.COMMIT, Point.RESUME)

# A second death, of the service that recovers from the first.
RECOVERY: tuple[tuple[tuple[Point, Side], tuple[Point, Side]], ...] = (
    ((Point.MARKER_CHECKPOINT, "after"), (Point.STAGE, "before")),
    ((Point.MARKER_CHECKPOINT, "after"), (Point.MARKER_CHECKPOINT, "before")),
    ((Point.MARKER_UPDATING_WEIGHTS, "after"), (Point.MARKER_CHECKPOINT, "after")),
    ((Point.MARKER_READY_TO_COMMIT, "after"), (Point.RESTORE, "after")),
    ((Point.MARKER_READY_TO_COMMIT, "after"), (Point.COMMIT, "before")),
    ((Point.COMMIT, "after"), (Point.RESTORE, "before")),
    ((Point.COMMIT, "after"), (Point.MARKER_COMPLETE, "before")),
    ((Point.COMMIT, "after"), (Point.MARKER_COMPLETE, "after")),
    ((Point.MARKER_HEAD_COMMITTED, "after"), (Point.RESUME, "before")),
    ((Point.MARKER_RUNNING, "after"), (Point.MARKER_REJECTED, "before")),
    ((Point.MARKER_RUNNING, "after"), (Point.MARKER_REJECTED, "after")),
    ((Point.MARKER_REJECTED, "after"), (Point.WRITE_OFF, "before")),
)


@dataclass(slots=True, frozen=True)
class Kill:
    """`victim` dies when the point's side is reached for the `occurrence`-th time after arming."""

    point: Point
    side: Side
    victim: str
    trigger: Trigger = "load"
    occurrence: int = 1
    then: tuple[Point, Side] | None = None  # where the service dies again while it recovers

    @property
    def name(self) -> str:
        parts = [f"{self.point} {self.side}"]
        if self.then is not None:
            parts.append(f"then {self.then[0]} {self.then[1]}")
        if self.trigger == "rollback":
            parts.append("of a rollback")
        return " ".join(parts)


@dataclass(slots=True, frozen=True)
class Kind:
    """One deployment."""

    name: str
    flags: dict[str, object]

    @property
    def retracts(self) -> bool:
        return self.flags["inference.pause-mode"] == "retract"

    @property
    def colocated(self) -> bool:
        return self.flags.get("training.colocate") == "true"


KINDS = tuple(
    Kind(f"{mode}-{pause}", {"training.mode": mode, "inference.pause-mode": pause})
    for mode, pause in (("lora", "in_place"), ("full", "retract"), ("lora", "retract"), ("full", "in_place"))
) + tuple(
    Kind(f"{mode}-colocated", {"training.mode": mode, "inference.pause-mode": "retract", "training.colocate": "true"})
    for mode in ("lora", "full")
)


def kills_of(kind: Kind) -> list[Kill]:
    """Every point and side that this deployment has, and the deaths of others; in the order of the points."""
    unreached = (set() if kind.colocated else ONLY_COLOCATED) | (set() if kind.retracts else ONLY_RETRACT)
    points = [point for point in Point if point not in unreached]
    found = [Kill(point, side, point.component, TRIGGERS.get(point, "load")) for point in points for side in SIDES]
    found += [Kill(point, side, "engine") for point in ENGINE_DIES_AT for side in SIDES]
    found += [Kill(point, side, "trainer") for point in TRAINER_DIES_AT for side in SIDES]
    if kind.colocated:
        found += [Kill(point, side, who) for point in HAND_OVERS for side in SIDES for who in ("engine", "trainer")]
    found += [Kill(point, side, "service", "rollback") for point in ROLLBACK_DIES_AT for side in SIDES]
    for (point, side), then in RECOVERY:
        found.append(Kill(point, side, "service", then=then))
    return found


def interleaved(kills: list[Kill], most: int = 2) -> list[Kill]:
    """At most `most` deaths of workers between two of the service: it gives up on a component that dies too often."""
    services = [kill for kill in kills if kill.victim == "service"]
    workers = [kill for kill in kills if kill.victim != "service"]
    ordered: list[Kill] = []
    while services or workers:
        ordered += workers[:most]
        del workers[:most]
        ordered += services[:1]
        del services[:1]
    return ordered
