"""The built-in recipe `scored`: learn from reports that carry a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reef.recipe.config import RecipeConfig
from reef.recipe.processor import ScoredProcessor
from reef.recipe.reports import parse_report, scored_schema
from reef.runtime.interfaces import Batch, Objective, Processor, Recipe, ReportRecord, StepSignal


class ScoredRecipe(Recipe):
    """Single reports against a running baseline, grouped ones against their group; the objective is the trainer's."""

    name = "scored"

    def __init__(self, config: RecipeConfig) -> None:
        self._config = config

    def processor(self, algorithm_state: Mapping[str, Any]) -> Processor:
        """Raises ConfigError if `algorithm_state` was committed by another recipe."""
        return ScoredProcessor(self._config, algorithm_state)

    def prepare(self, batch: Batch) -> StepSignal:
        objective = Objective(self._config.objective, dict(self._config.objective_params))
        return StepSignal(objective=objective, samples=batch.samples, metrics=batch.metrics)

    def validate_report(self, report: ReportRecord) -> None:
        parse_report(report)

    def contract(self) -> dict[str, Any]:
        config = self._config
        return {
            "recipe": self.name,
            "trains": True,
            "report": scored_schema(),
            "eligibility": {
                "never_trains": self._never_trains(),
                "max_staleness": config.max_staleness,
                "min_age_seconds": config.min_age,
                "train_on_length": config.train_on_length,
            },
            "groups": {
                "key": "metadata.group",
                "advantage": config.advantage,
                "wait_seconds": config.group_wait,
                "complete": "when metadata.group_size reports arrived, or after wait_seconds; one report alone is "
                "compared with the running baseline",
            },
            "batch": {
                "size": config.batch_size,
                "unit": "whole reports and groups, oldest first; groups of equal scores are consumed without training",
            },
            "score": {
                "min": config.score_min,
                "max": config.score_max,
                "normalize": config.normalize,
                "baseline_decay": config.baseline_decay,
            },
            "objective": {"name": config.objective, "params": dict(config.objective_params)},
        }

    def _never_trains(self) -> list[str]:
        rules = [
            "answers that the client left or the engine cut off",
            "requests that did not end with status 200, or whose token ids were not captured",
            "answers that another report scored first, or that a step consumed before",
            "reports without a score, and reports with an error (counted as refused.grader_error)",
            "one of several answers (n > 1) unless metadata.choice says which",
        ]
        if not self._config.train_on_length:
            rules.append("answers that the token budget cut")
        if self._config.max_staleness is not None:
            rules.append(f"answers more than {self._config.max_staleness} publications older than the head")
        return rules
