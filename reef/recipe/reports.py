"""What a scored report may say, and the JSON Schema that tells its sender."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from reef.errors import InvalidRequest
from reef.runtime.interfaces import ReportRecord

LARGEST_SCORE = 1e9
"""Squares and sums of scores stay finite and exact enough below it."""


@dataclass(slots=True, frozen=True)
class ScoredReport:
    """The fields of a report that the scored recipe reads, checked. `score` is None when nothing was scored."""

    score: float | None
    group: str | None
    group_size: int | None
    choice: int | None


def parse_report(report: ReportRecord) -> ScoredReport:
    """Raises InvalidRequest naming the field."""
    if not report.references:
        raise InvalidRequest("references must name at least one receipt, got none", "references")
    if report.score is not None and report.error is not None:
        raise InvalidRequest("score and error exclude one another: a grader that failed has no score", "score")
    group = report.metadata.get("group")
    if group is not None and (not isinstance(group, str) or not group):
        raise InvalidRequest(f"metadata.group must be a non-empty string, got {group!r}", "metadata.group")
    group_size = _integer(report.metadata, "group_size", 2)
    if group_size is not None and group is None:
        raise InvalidRequest("metadata.group_size needs metadata.group", "metadata.group_size")
    return ScoredReport(_score(report.score), group, group_size, _integer(report.metadata, "choice", 0))


def _score(score: Any) -> float | None:
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise InvalidRequest(f"score must be a number, got {score!r}", "score")
    # Compared before float(): a huge integer would overflow there; NaN fails the comparison.
    if not abs(score) <= LARGEST_SCORE:
        bound = f"between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}"
        raise InvalidRequest(f"score must be {'finite' if not _finite(score) else bound}, got {score}", "score")
    return float(score)


def _finite(score: float) -> bool:
    return isinstance(score, int) or math.isfinite(score)


def _integer(metadata: dict[str, Any], name: str, least: int) -> int | None:
    value = metadata.get(name)
    if value is None:
        return None
    field = f"metadata.{name}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{field} must be an integer, got {value!r}", field)
    if value < least:
        raise InvalidRequest(f"{field} must be >= {least}, got {value}", field)
    return value


def scored_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the report body that the scored recipe trains on."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "required": ["references"],
        "not": {"required": ["score", "error"]},
        "properties": {
            "references": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "description": "receipts; the score counts for each answer, as for the turns of one episode",
            },
            "score": {
                "type": "number",
                "minimum": -LARGEST_SCORE,
                "maximum": LARGEST_SCORE,
                "description": "higher is better; a report without score or error is stored and never trains",
            },
            "error": {"type": "string", "description": "the grader failed: counted, never trained as a score"},
            "feedback": {"type": ["string", "object"]},
            "metadata": {
                "type": "object",
                "properties": {
                    "group": {
                        "type": "string",
                        "minLength": 1,
                        "description": "reports that share it are compared with one another",
                    },
                    "group_size": {"type": "integer", "minimum": 2, "description": "reports the group will have"},
                    "choice": {
                        "type": "integer",
                        "minimum": 0,
                        "description": "index of the scored answer; needed when a request asked for several (n > 1)",
                    },
                },
                "dependentRequired": {"group_size": ["group"]},
            },
            "agent_record_id": {"type": "string", "description": "an id of your own, which makes retrying harmless"},
        },
    }
