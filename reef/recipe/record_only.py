"""The built-in recipe `record-only`: keep every exchange and report, train never."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reef.errors import TrainingError
from reef.recipe.config import RecipeConfig
from reef.runtime.interfaces import Batch, Recipe, ReportRecord, StepSignal


class RecordOnlyRecipe(Recipe):
    """Accepts any report and never trains."""

    name = "record-only"

    def __init__(self, config: RecipeConfig) -> None:
        self._config = config

    def processor(self, algorithm_state: Mapping[str, Any]) -> None:
        """Nothing to process."""

    def prepare(self, batch: Batch) -> StepSignal:
        """Raises TrainingError."""
        raise TrainingError("recipe record-only never trains")

    def validate_report(self, report: ReportRecord) -> None:
        """Every report is welcome."""

    def contract(self) -> dict[str, Any]:
        return {
            "recipe": self.name,
            "trains": False,
            "report": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {
                    "references": {"type": "array", "items": {"type": "string"}, "description": "receipts"},
                    "score": {"type": "number"},
                    "error": {"type": "string"},
                    "feedback": {"type": ["string", "object"]},
                    "metadata": {"type": "object"},
                    "agent_record_id": {"type": "string"},
                },
            },
        }
