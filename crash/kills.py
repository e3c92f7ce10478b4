"""What is killed, where, and what has to happen for the point to be reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Literal, get_args

from reef.points import Point, Side

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


# What a coordinator in a process of its own crosses instead of the service.
COORDINATED = (
    *(point for point in Point if point.name.startswith("MARKER_")),
    Point.BLOB,
    Point.CHECKPOINT,
    Point.TRAIN,
    Point.STAGE,
    Point.PROBE,
    Point.PAUSE,
    Point.SWITCH,
    Point.VERIFY,
    Point.RESUME,
    Point.DROP,
    Point.RESTORE,
    Point.RESTART_ENGINES,
    Point.RESTART_TRAINER,
)

# Between these, the engines hold weights that are not committed, and clients must not see a token of them.
GATED = (Point.SWITCH, Point.VERIFY, Point.MARKER_READY_TO_COMMIT, Point.COMMIT)
LINGER_SECONDS = 1.0
"""How long the service stays at a gated point before it dies, so that what slips through has time to reach a client."""

# Where bytes are written that may find no room.
WRITES = (
    Point.APPEND_RECORD,
    Point.APPEND_REPORT,
    Point.APPEND_INSTRUCTION,
    Point.CREATE_SCENARIO,
    Point.LOAD_SEQUENCE,
    Point.COMMIT,
    Point.WRITE_OFF,
    Point.HEAD,
    Point.CONSUMPTION,
    Point.BLOB,
    Point.CHECKPOINT,
    Point.RETAIN,
    *(point for point in Point if point.name.startswith("MARKER_")),
    Point.TRAINER_WRITE,
)

DISK = "disk"
"""The victim of a `Kill` that is no death: the file system is full when the point is reached."""


@dataclass(slots=True, frozen=True)
class Kill:
    """`victim` dies when the point's side is reached for the `occurrence`-th time after arming."""

    point: Point
    side: Side
    victim: str
    trigger: Trigger = "load"
    occurrence: int = 1
    then: tuple[Point, Side] | None = None  # where the service dies again while it recovers
    hangs: bool = False  # the victim is not killed but stopped: it has to be noticed

    @property
    def linger(self) -> float:
        gated = (self.point in GATED) and (self.point, self.side) not in ((GATED[0], "before"), (GATED[-1], "after"))
        return LINGER_SECONDS if gated and self.victim in ("service", "coordinator") else 0.0

    @property
    def name(self) -> str:
        parts = [f"{self.point} {self.side}"]
        if self.hangs:
            parts.append("hangs")
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
    needs: tuple[str, ...] = ()  # packages beyond those of every kind
    disk: bool = False  # nobody dies: its data are on a file system that is full when something is written
    owners: Mapping[Point, str] = field(default_factory=dict)  # who crosses a point, where its name does not say so

    @property
    def missing(self) -> list[str]:
        return [package for package in self.needs if find_spec(package) is None]

    def reaches(self, point: Point) -> bool:
        if point in ONLY_RETRACT:
            return self.flags["inference.pause-mode"] == "retract"
        return point not in ONLY_COLOCATED or self.colocated

    def owner(self, point: Point) -> str:
        """The component whose process crosses it."""
        return self.owners.get(point, point.component)

    @property
    def colocated(self) -> bool:
        return self.flags.get("training.colocate") == "true"


def _kind(mode: str, pause: str, executor: str = "mp", needs: tuple[str, ...] = (), **more: object) -> Kind:
    """`more` are flags whose section is `training`; those that are set are part of the name."""
    flags = {"training.mode": mode, "inference.pause-mode": pause, "execution.executor": executor}
    name = "-".join([mode, pause, *([] if executor == "mp" else [executor]), *more])
    return Kind(name, {**flags, **{f"training.{key}": value for key, value in more.items()}}, needs)


def _coordinated(kind: Kind) -> Kind:
    """The same with the coordinator in a process of its own."""
    flags = {**kind.flags, "execution.runtime": "executor_training"}
    return replace(kind, name=f"{kind.name}-coordinator", flags=flags, owners=dict.fromkeys(COORDINATED, "coordinator"))


KINDS = (
    _kind("lora", "in_place"),
    _kind("full", "retract"),
    _kind("lora", "retract"),
    _kind("full", "in_place"),
    _kind("lora", "in_place", "ray", needs=("ray",)),
    _kind("full", "retract", "ray", needs=("ray",)),
    replace(_kind("lora", "in_place"), name="lora-in_place-full_disk", disk=True),
    _coordinated(_kind("lora", "in_place")),
    _kind("lora", "retract", colocate="true"),
    _kind("full", "retract", colocate="true"),
)


def kills_of(kind: Kind) -> list[Kill]:
    """Every point and side that this deployment has, and the deaths of others; in the order of the points."""
    if kind.disk:
        return [Kill(point, "before", DISK, TRIGGERS.get(point, "load")) for point in WRITES]
    points = [point for point in Point if kind.reaches(point)]
    found = [Kill(point, side, kind.owner(point), TRIGGERS.get(point, "load")) for point in points for side in SIDES]
    found += [Kill(point, side, "engine") for point in ENGINE_DIES_AT for side in SIDES]
    found += [Kill(point, side, "trainer") for point in TRAINER_DIES_AT for side in SIDES]
    if kind.colocated:
        found += [Kill(point, side, who) for point in HAND_OVERS for side in SIDES for who in ("engine", "trainer")]
    found += [Kill(point, side, "service", "rollback") for point in ROLLBACK_DIES_AT for side in SIDES]
    found.append(Kill(Point.APPEND_RECORD, "after", "engine", hangs=True))
    if not kind.owners:
        found += [Kill(point, side, "service", then=then) for (point, side), then in RECOVERY]
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
