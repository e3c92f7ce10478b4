"""From scores to advantages: pure functions over lists of floats, one number per report.

Equal scores give exact zeros, never rounding noise, so "no signal" can be told by comparing with 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def group_relative(scores: Sequence[float], normalize: bool = False) -> list[float]:
    """Score minus the group's mean, optionally over its population standard deviation. [num_reports]

    Source: GRPO (Shao et al. 2024, DeepSeekMath, section 4.1); without `normalize`, as in Liu et al. 2025, section 3.
    """
    if not scores or min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = _mean(scores)
    centered = [score - mean for score in scores]
    return _over(centered, _deviation(centered)) if normalize else centered


def leave_one_out(scores: Sequence[float], normalize: bool = False) -> list[float]:
    """Score minus the mean of the others, optionally over the group's standard deviation. [num_reports]

    Source: RLOO (Ahmadian et al. 2024, section 3.2). Raises ValueError for a single score: nothing is left.
    """
    if len(scores) == 1:
        raise ValueError("leave_one_out needs >= 2 scores, got 1")
    scale = len(scores) / (len(scores) - 1) if scores else 1.0
    return [scale * value for value in group_relative(scores, normalize)]


@dataclass(slots=True, frozen=True)
class RunningBaseline:
    """Exponentially weighted mean and variance of a scenario's scores: what a single rollout is compared with.

    `weight` is 1 - decay ** (scores seen); dividing by it removes the pull of an empty start (as in Adam, Kingma & Ba
    2015, section 3), so that early on `mean` is nearly the plain mean.
    """

    mean: float = 0.0
    variance: float = 0.0
    weight: float = 0.0

    def updated(self, scores: Sequence[float], decay: float) -> RunningBaseline:
        """After one step's scores, which count alike: together they weigh 1 - decay ** len(scores)."""
        if not scores:
            return self
        keep = decay ** len(scores)
        weight = keep * self.weight + (1 - keep)
        share = (1 - keep) / weight
        mean = _mean(scores)
        spread = _mean([(score - mean) ** 2 for score in scores])
        shift = mean - self.mean
        return RunningBaseline(
            mean=self.mean + share * shift,
            variance=(1 - share) * self.variance + share * spread + share * (1 - share) * shift * shift,
            weight=weight,
        )

    def advantages(self, scores: Sequence[float], after: RunningBaseline, normalize: bool = False) -> list[float]:
        """Score minus the running mean, optionally over the deviation. [num_reports]

        `after` is this baseline once the step's scores are in it. Its mean stands in while nothing was seen before; its
        deviation is the divisor, so that the first score that differs after many equal ones stays bounded.
        """
        mean = self.mean if self.weight else after.mean
        centered = [0.0 if math.isclose(score, mean, rel_tol=1e-9, abs_tol=1e-12) else score - mean for score in scores]
        return _over(centered, math.sqrt(after.variance)) if normalize else centered

    def to_json(self) -> dict[str, float]:
        return {"mean": self.mean, "variance": self.variance, "weight": self.weight}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> RunningBaseline:
        """Raises KeyError, TypeError or ValueError when `state` is not what `to_json` gave."""
        return cls(*(float(state[name]) for name in ("mean", "variance", "weight")))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(centered: Sequence[float]) -> float:
    return math.sqrt(_mean([value * value for value in centered]))


def _over(values: Sequence[float], deviation: float) -> list[float]:
    return [value / deviation for value in values] if deviation > 0.0 else list(values)
