"""The table of lanes and loads that an engine is told, and what an engine's state says of it."""

from __future__ import annotations

from typing import Any

from reef.errors import EngineError
from reef.inference.sglang.control import EngineState
from reef.runtime.interfaces import BASE_LOAD_ID, EngineReport, MemoryRegion, MemoryReport


def table_entry(content_id: str, adapter: str | None, weights: str) -> dict[str, Any]:
    return {"content_id": content_id, "adapter": adapter, "weights": weights}


def engine_report(name: str, state: EngineState) -> EngineReport:
    """Loads that are resident, or are the base model's content, which always can be; one page is one token.

    Raises EngineError for an engine that has just started.
    """
    if BASE_LOAD_ID not in state.loads:
        raise EngineError(f"{name} was not told of any load yet")
    schedulers = state.schedulers
    base = state.loads[BASE_LOAD_ID]["content_id"]
    resident = {
        load: entry["content_id"]
        for load, entry in state.loads.items()
        if entry["content_id"] == base
        or (entry["adapter"] in state.adapters if entry["adapter"] else entry["weights"] == state.weights)
    }
    return EngineReport(
        engine=name,
        lanes=state.lanes,
        loads=resident,
        paused=state.paused,
        free_pages=sum(one.free_tokens for one in schedulers),
        total_pages=sum(one.total_tokens for one in schedulers),
        running=sum(one.running for one in schedulers),
        waiting=sum(one.waiting for one in schedulers),
        dtype=state.settings.dtype,
        stats={
            "cached_tokens": float(sum(one.cached_tokens for one in schedulers)),
            "compiling": float(sum(one.compiling for one in schedulers)),
            "resident_bytes": float(sum(one.resident_bytes for one in schedulers)),
        },
    )


def memory_report(name: str, before: EngineState, after: EngineState) -> MemoryReport:
    """What every scheduler of the engine released, from what its processes held."""
    held = [set(one.released) for one in after.schedulers]
    return MemoryReport(
        owner=name,
        released=[region for region in MemoryRegion if all(region.value in released for released in held)],
        bytes_before=sum(one.resident_bytes for one in before.schedulers),
        bytes_after=sum(one.resident_bytes for one in after.schedulers),
        device_free=sum(one.device_free for one in after.schedulers),
    )
