"""Which loads stay in the engines, and which makes room.

An engine has slots: one for each set of bytes besides the base model's. Loads of the same bytes share a slot. What a
lane serves (`current`) and the candidate in flight (`pinned`) are never evicted, nor is what a request still decodes
with (`in flight`, which the engine knows). An adapter that a release replaced stays, so that a rollback to it reads no
file, until its slot is needed; the least recently current goes first. Full weights go at once: they are as large as the
base.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from reef.errors import EngineError, EngineUncertain
from reef.points import Point, crossing
from reef.runtime.interfaces import BASE_LOAD_ID, InferenceBackend, WeightKind, WeightLoad

log = logging.getLogger("reef.residency")


class Residency:
    """What the engines hold besides the base load, as far as they confirmed it. `current` are the lanes' load IDs."""

    def __init__(self, engines: InferenceBackend) -> None:
        self._engines = engines
        self._loads: dict[str, WeightLoad] = {}  # by runtime load ID, least recently current first
        self._pinned: set[str] = set()
        self._leaked: dict[str, str] = {}  # runtime load ID -> why it could not be freed, or is not certainly free

    def clear(self) -> None:
        """The engines were replaced."""
        self._loads, self._pinned, self._leaked = {}, set(), {}

    def stage(self, load: WeightLoad, current: Collection[str], *, pin: bool = False) -> None:
        """Make it resident, evicting what nobody uses if it needs a slot. Raises EngineError, EngineUncertain."""
        load_id = load.runtime_load_id
        if load_id not in self._loads:
            self._make_room(load, current)
        try:
            self._engines.stage(load)
        except EngineUncertain as error:
            self._loads[load_id], self._leaked[load_id] = load, str(error)
            raise
        if load_id != BASE_LOAD_ID:
            self._loads[load_id] = load
        self._leaked.pop(load_id, None)
        if pin:
            self._pinned.add(load_id)

    def release(self, load_id: str, replaced: str | None, current: Collection[str]) -> None:
        """A candidate became a release. What it replaced stays while there is room, unless that makes no sense."""
        self._pinned.discard(load_id)
        if replaced in self._loads:
            self._loads[replaced] = self._loads.pop(replaced)
        for unused in self._unused(current):
            load = self._loads[unused]
            twin = any(one.content_id == load.content_id for one in self._loads.values() if one is not load)
            if twin or load.kind is WeightKind.FULL:
                self.drop(unused)

    def drop(self, load_id: str) -> None:
        """Free a load that no lane serves. One that cannot be freed is a leak, not a fault: it stays visible."""
        self._pinned.discard(load_id)
        try:
            with crossing(Point.DROP):
                self._engines.drop(load_id)
        except EngineError as error:
            self._leak(load_id, error)
        else:
            self._forget(load_id)

    def status(self, current: dict[str, str]) -> dict[str, Any]:
        """For people; `current` maps scenarios to load IDs."""
        loads = [
            {
                "runtime_load_id": load_id,
                "content_id": load.content_id,
                "state": self._state(load_id, current.values()),
                "scenarios": sorted(scenario for scenario, served in current.items() if served == load_id),
                "error": self._leaked.get(load_id),
            }
            for load_id, load in list(self._loads.items())  # others may change it meanwhile
        ]
        return {"slots": self._engines.max_loads, "used": len(self._contents()), "loads": loads}

    def _state(self, load_id: str, current: Collection[str]) -> str:
        if load_id in current:
            return "current"
        if load_id in self._leaked:
            return "leaked"
        return "pinned" if load_id in self._pinned else "unused"

    def _unused(self, current: Collection[str]) -> list[str]:
        """What may be freed, least recently current first."""
        return [load_id for load_id in self._loads if load_id not in current and load_id not in self._pinned]

    def _contents(self, *more: WeightLoad) -> set[str]:
        """The sets of bytes that take a slot."""
        return {load.content_id for load in (*list(self._loads.values()), *more) if load.path is not None}

    def _make_room(self, load: WeightLoad, current: Collection[str]) -> None:
        slots = self._engines.max_loads
        for load_id in sorted(self._unused(current), key=lambda load_id: load_id not in self._leaked):  # leaks first
            if len(self._contents(load)) <= slots:
                return
            if self._loads[load_id].content_id != load.content_id:
                self._evict(load_id)
        if len(self._contents(load)) > slots:
            raise EngineError(
                f"{load.runtime_load_id} finds no slot: all {slots} (inference.max-loads) hold releases that serve, "
                "candidates, or what a request still uses"
            )

    def _evict(self, load_id: str) -> None:
        try:
            with crossing(Point.DROP):
                evicted = self._engines.evict(load_id)
        except EngineError as error:
            self._leak(load_id, error)
            return
        if evicted:
            log.info("load %s made room", load_id)
            self._forget(load_id)

    def _leak(self, load_id: str, error: EngineError) -> None:
        log.warning("load %s could not be freed: %s", load_id, error)
        if load_id in self._loads:
            self._leaked[load_id] = str(error)

    def _forget(self, load_id: str) -> None:
        self._loads.pop(load_id, None)
        self._leaked.pop(load_id, None)
