"""A recipe of one's own: imitate the answers that did better than what they are compared with, ignore the others.

Everything but the learning signal is the built-in recipe's: eligibility, groups, baseline, batches.
`recipe.options.least-advantage` is how much better an answer must be.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reef.errors import ConfigError
from reef.recipe import RecipeConfig
from reef.recipe.scored import ScoredRecipe
from reef.runtime.interfaces import Batch, Objective, StepSignal, TrainSample


class ImitateBest(ScoredRecipe):
    """Cross-entropy on the better answers, each token with weight 1."""

    name = "imitate-best"

    def __init__(self, config: RecipeConfig) -> None:
        super().__init__(config)
        self._least = config.options.get("least-advantage", 0.0)
        if isinstance(self._least, bool) or not isinstance(self._least, int | float) or self._least < 0:
            raise ConfigError(f"recipe.options.least-advantage must be a number >= 0, got {self._least!r}")

    def prepare(self, batch: Batch) -> StepSignal:
        """A batch with signal has an answer above its comparison or one below; with none above, nothing moves."""
        best = [_imitate(sample) for sample in batch.samples if sample.advantages[0] > self._least]
        return StepSignal(
            objective=Objective("cross_entropy"),
            samples=best or [replace(sample, advantages=[0.0] * len(sample.advantages)) for sample in batch.samples],
            metrics={**batch.metrics, "imitated": float(len(best))},
        )

    def contract(self) -> dict[str, Any]:
        return {**super().contract(), "objective": {"name": "cross_entropy", "least_advantage": self._least}}


def _imitate(sample: TrainSample) -> TrainSample:
    return replace(sample, advantages=[1.0] * len(sample.advantages))


build = ImitateBest
