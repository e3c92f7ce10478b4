"""Which bundle of resources each worker gets: a plan made before anything is allocated, and the seats it leads to.

    components ──plan──► bundles ──one placement group──► places (node, device) ──assign──► a seat per worker

A bundle is what one worker needs. Disjoint components have bundles of their own; colocated ones share: worker n of each
sits in bundle n, on the same device. Bundles come back from the cluster in no useful order, so they are sorted by node
and device first: neighbours in rank are neighbours in hardware.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What the workers of one component need, each."""

    name: str
    workers: int
    cpus: float = 1.0  # logical: what the cluster counts, not a limit
    gpus: float = 0.0  # devices
    here: bool = False  # must run on the node of the process that owns them


@dataclass(frozen=True, slots=True)
class Bundle:
    cpus: float
    gpus: float
    here: bool


@dataclass(frozen=True, slots=True)
class Plan:
    components: tuple[Component, ...]
    bundles: tuple[Bundle, ...]
    colocated: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where the cluster put a bundle."""

    index: int  # of the bundle in the plan
    node: str  # id
    address: str
    device: str = ""  # of the node; "" without one


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker's share of a bundle."""

    place: Place
    cpus: float
    gpus: float


def plan(components: Sequence[Component], *, colocate: bool = False) -> Plan:
    """Return the bundles that these components need; allocates nothing. Raises ValueError for what cannot be placed."""
    names = [component.name for component in components]
    if len(set(names)) != len(names):
        raise ValueError(f"components must have different names, got {', '.join(names)}")
    for one in components:
        if one.workers < 0 or one.cpus < 0 or one.gpus < 0:
            raise ValueError(f"workers, cpus and gpus of {one.name} must be >= 0, got {one}")
        if one.gpus > 1 and (colocate or one.gpus != int(one.gpus)):
            whole = "<= 1 where devices are shared" if colocate else "a whole number above 1"
            raise ValueError(f"gpus of a worker of {one.name} must be {whole}, got {one.gpus:g}")
    if not colocate:
        own = [Bundle(one.cpus, one.gpus, one.here) for one in components for _ in range(one.workers)]
        return Plan(tuple(components), tuple(own), False)
    shared = []
    for rank in range(max((one.workers for one in components), default=0)):
        sharing = [one for one in components if rank < one.workers]
        cpus, gpus = sum(one.cpus for one in sharing), max(one.gpus for one in sharing)
        shared.append(Bundle(cpus, gpus, any(one.here for one in sharing)))
    return Plan(tuple(components), tuple(shared), True)


def assign(planned: Plan, places: Sequence[Place]) -> dict[str, list[Seat]]:
    """Give each component its seats, in order of rank. `places` has one entry per bundle, in any order."""
    waiting: dict[Bundle, list[Place]] = defaultdict(list)
    for place in sorted(places, key=_position):
        waiting[planned.bundles[place.index]].append(place)
    if planned.colocated:
        in_rank = [waiting[bundle].pop(0) for bundle in planned.bundles]
        return {one.name: _shared_seats(planned, one, in_rank) for one in planned.components}
    seats: dict[str, list[Seat]] = {}
    for one in planned.components:
        its_places = waiting[Bundle(one.cpus, one.gpus, one.here)]
        seats[one.name] = [Seat(its_places.pop(0), one.cpus, one.gpus) for _ in range(one.workers)]
    return seats


def _shared_seats(planned: Plan, component: Component, in_rank: Sequence[Place]) -> list[Seat]:
    seats = []
    for rank in range(component.workers):
        sharing = sum(rank < one.workers and one.gpus > 0 for one in planned.components)
        # Hundredths: clusters count devices in steps of 1/10000, and the shares must not add up to more than one.
        gpus = int(100 * component.gpus / sharing) / 100 if sharing else 0.0
        seats.append(Seat(in_rank[rank], component.cpus, gpus))
    return seats


def _position(place: Place) -> tuple[list[tuple[int, str]], str, list[tuple[int, str]], int]:
    return _natural(place.address), place.node, _natural(place.device), place.index


def _natural(text: str) -> list[tuple[int, str]]:
    """Sort key that puts "10" after "9"."""
    parts = re.split(r"(\d+)", text)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
