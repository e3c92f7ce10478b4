"""What waits in the scored processor: answers, the reports that score them, and the units that train together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from reef.recipe.config import RecipeConfig
from reef.runtime.interfaces import Generation, TrainSample


@dataclass(slots=True)
class Sample:
    """One answer that waits to train."""

    record_id: str
    choice: int
    release_id: str | None
    generation: Generation

    def train(self, advantage: float) -> TrainSample:
        """The same advantage for every token."""
        return TrainSample(
            record_id=self.record_id,
            prompt_ids=self.generation.prompt_ids,
            output_ids=self.generation.output_ids,
            logprobs=self.generation.logprobs,
            advantages=[advantage] * len(self.generation.output_ids),
            release_id=self.release_id,
        )


Member = tuple[object, ...]
"""What a report judged (choice and receipts): a grader's second try judges the same."""


@dataclass(slots=True)
class Scored:
    """One report that waits, with the answers it scored."""

    report_id: str
    sequence: int
    created_at: float
    member: Member
    score: float
    samples: list[Sample]


@dataclass(slots=True, eq=False)
class Unit:
    """Reports that train together: all of one group, or a single one that names no group."""

    group: str | None
    created_at: float
    last_at: float
    size: int | None = None  # declared number of reports
    reports: list[Scored] = field(default_factory=list)  # by sequence
    failed: set[Member] = field(default_factory=set)  # members that will never train, so none waits for them

    def samples(self) -> Iterator[Sample]:
        return (sample for report in self.reports for sample in report.samples)

    def add(self, report: Scored) -> None:
        self.failed.discard(report.member)
        self.reports.append(report)
        self.reports.sort(key=lambda scored: scored.sequence)

    def waits(self, now: float, config: RecipeConfig) -> str | None:
        """Why it cannot train now, or None."""
        if any(_age(now, report.created_at) < config.min_age for report in self.reports):
            return "too_young"
        return None if self.complete(now, config) else "waiting_for_group"

    def complete(self, now: float, config: RecipeConfig) -> bool:
        """True when no more reports are waited for."""
        if self.group is None:
            return True
        if self.size is None:
            # From the first report on: a group without a size to which reports are added for ever must still train.
            return _age(now, self.created_at) >= config.group_wait
        return len(self.reports) + len(self.failed) >= self.size or _age(now, self.last_at) >= config.group_wait


def _age(now: float, since: float) -> float:
    """Seconds between the two: when the clock has jumped far back, nothing waits until it is there again."""
    return abs(now - since)
