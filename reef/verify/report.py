"""What a verification found: numbers per release, and every answer that is not what its spans say."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from reef.runtime.interfaces import Release


@dataclass(slots=True)
class ReleaseReport:
    """The tokens that one release's load produced. Differences are in nats; `mean` is None without tokens."""

    number: int
    release_id: str
    kind: str
    runtime_load_id: str
    content_id: str
    tokens: int = 0
    frozen_tokens: int = 0  # rest on keys and values of an older load, as `in_place` allows
    over: int = 0  # tokens above the tolerance
    worst: float = 0.0
    mean: float | None = None
    worst_record: str | None = None  # the receipt
    total: float = 0.0

    @classmethod
    def of(cls, release: Release) -> ReleaseReport:
        return cls(release.number, release.release_id, release.kind, release.runtime_load_id, release.content_id)

    def add(self, receipt: str, differences: list[float], frozen: int, tolerance: float) -> None:
        """Take the differences of one span. What is not a number is infinitely far off."""
        found = [math.inf if math.isnan(one) else one for one in differences]
        self.tokens += len(found)
        self.frozen_tokens += frozen
        self.over += sum(one > tolerance for one in found)
        self.total += sum(found)
        self.mean = self.total / self.tokens
        if self.worst_record is None or max(found) > self.worst:
            self.worst, self.worst_record = max(found), receipt


@dataclass(slots=True)
class Problem:
    """One thing that is wrong. `record_id` is the receipt; None: it concerns no single answer."""

    record_id: str | None
    message: str


@dataclass(slots=True)
class ScenarioReport:
    scenario: str
    answers: int = 0  # re-scored, each choice of a record on its own
    unanswered: int = 0  # choices without a token: nothing to check
    releases: list[ReleaseReport] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    model: str
    tolerance: float  # nats
    scenarios: list[ScenarioReport] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not any(one.problems for one in self.scenarios)

    def as_dict(self) -> dict[str, Any]:
        document = {"clean": self.clean, **asdict(self)}
        for scenario in document["scenarios"]:
            for release in scenario["releases"]:
                del release["total"]
                for name in ("worst", "mean"):
                    if release[name] == math.inf:  # JSON has no infinity
                        release[name] = None
        return document

    def lines(self) -> list[str]:
        """For people: a line for each release that produced tokens, then what is wrong."""
        shown = []
        for scenario in self.scenarios:
            shown.append(f"{scenario.scenario}: {scenario.answers} answers re-scored")
            for one in scenario.releases:
                if one.mean is not None:
                    frozen = f", {one.frozen_tokens} on older KV" if one.frozen_tokens else ""
                    shown.append(
                        f"  release {one.number} ({one.kind}, {one.runtime_load_id}): {one.tokens} tokens{frozen}, "
                        f"mean {one.mean:.2g}, worst {one.worst:.2g} nat"
                        + (f", {one.over} over {self.tolerance:g}" if one.over else "")
                    )
            shown += [f"  {problem.record_id or 'store'}: {problem.message}" for problem in scenario.problems]
        verdict = "clean" if self.clean else "NOT what was recorded"
        return [*shown, f"{verdict} (tolerance {self.tolerance:g} nat, base model {self.model})"]
