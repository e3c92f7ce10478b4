from __future__ import annotations

import pytest

from reef.errors import EngineError
from reef.inference.sglang.control import EngineState, SchedulerState, Settings
from reef.inference.sglang.table import engine_report, table_entry


def state(loads) -> EngineState:
    return EngineState(
        plugin="2", weights="engine:0", lanes={}, loads=loads, adapters={"engine:1": 0}, max_context=8, vocab_size=8,
        schedulers=[SchedulerState("engine:0", False, 0, 0, 0, 7, 2, 9, 100, 50, [])],
        settings=Settings("m", "float32", False, True, "null", 1, 1), adapter_scoped=True, version_keyed=True,
    )  # fmt: skip


def test_resident_loads_are_reported():
    loads = {
        "engine:0": table_entry("base", None, "engine:0"),
        "engine:1": table_entry("one", "engine:1", "engine:0"),
        "engine:2": table_entry("two", "engine:2", "engine:0"),
        "engine:3": table_entry("base", None, "engine:3"),
    }
    report = engine_report("engine-0", state(loads))
    assert report.loads == {"engine:0": "base", "engine:1": "one", "engine:3": "base"}
    assert (report.free_pages, report.total_pages, report.stats["cached_tokens"]) == (7, 9, 2)


def test_an_engine_that_has_just_started_has_no_report():
    with pytest.raises(EngineError, match="engine-0 was not told of any load yet"):
        engine_report("engine-0", state({}))
