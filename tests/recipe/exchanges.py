"""Records and reports as the gateway would store them, small enough to read in a test."""

from __future__ import annotations

from reef.recipe import RecipeConfig
from reef.recipe.processor import ScoredProcessor
from reef.runtime.interfaces import Consumption, Ending, Generation, InferenceRecord, ReportRecord, Span


def generation(tokens: int = 3, ending: Ending = Ending.STOP) -> Generation:
    return Generation(
        prompt_ids=[1, 2],
        output_ids=list(range(10, 10 + tokens)),
        logprobs=[-0.5] * tokens,
        sampled_logprobs=[-0.5] * tokens,
        spans=[Span(0, tokens, "engine:0")],
        ending=ending,
    )


def record(record_id: str, *generations: Generation, release_id="r0", status=200, captured=True) -> InferenceRecord:
    return InferenceRecord(
        record_id=record_id,
        scenario="s",
        created_at=0.0,
        route="/v1/chat/completions",
        request=b"{}",
        response=b"{}",
        status=status,
        release_id=release_id,
        generations=list(generations or [generation()]) if captured else [],
    )


def report(report_id: str, *references: str, score=None, error=None, at=0.0, sequence=0, **metadata) -> ReportRecord:
    return ReportRecord(
        record_id=report_id,
        scenario="s",
        created_at=at,
        references=list(references),
        score=score,
        error=error,
        metadata=metadata,
        sequence=sequence,
    )


class Desk:
    """A processor with the records that its reports quote; sequence numbers as the store would give them."""

    def __init__(self, config: RecipeConfig, state: dict | None = None) -> None:
        self.processor = ScoredProcessor(config, state or {})
        self.records: dict[str, InferenceRecord] = {}
        self.sequence = 0

    def exchange(self, *records: InferenceRecord) -> None:
        self.records |= {one.record_id: one for one in records}

    def report(self, report_id: str, *references: str, consumed=None, **fields) -> list[Consumption]:
        self.sequence += 1
        taken = report(report_id, *references, sequence=self.sequence, **fields)
        quoted = {one: self.records[one] for one in references if one in self.records}
        return self.processor.ingest(taken, quoted, consumed)

    def scored(self, name: str, score: float, **fields) -> list[Consumption]:
        """One exchange and its report: record `name`, report `report-name`."""
        self.exchange(record(name))
        return self.report(f"report-{name}", name, score=score, **fields)
