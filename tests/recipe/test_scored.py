from __future__ import annotations

from reef.recipe import RecipeConfig, build_recipe
from reef.runtime.interfaces import Objective
from tests.recipe.exchanges import record, report


def test_prepare_names_the_objective_and_passes_its_parameters_unchecked() -> None:
    recipe = build_recipe(RecipeConfig(batch_size=1, objective="mine", objective_params={"clip": 0.2, "odd": True}))
    processor = recipe.processor({"baseline": {"mean": 0.0, "variance": 0.0, "weight": 1.0}})
    processor.ingest(report("report", "r", score=1.0), {"r": record("r")})
    batch = processor.build(0.0)
    signal = recipe.prepare(batch)
    assert signal.objective == Objective("mine", {"clip": 0.2, "odd": True})
    assert signal.samples is batch.samples
    assert signal.metrics["mean_score"] == 1.0


def test_processor_continues_from_the_committed_state() -> None:
    recipe = build_recipe(RecipeConfig(batch_size=1, baseline_decay=0.5))
    first = recipe.processor({})
    first.ingest(report("report-a", "a", score=1.0), {"a": record("a")})
    first.acknowledge(first.build(0.0))
    second = recipe.processor(first.state())
    second.ingest(report("report-b", "b", score=0.0), {"b": record("b")})
    assert second.build(0.0).samples[0].advantages[0] == -1.0
