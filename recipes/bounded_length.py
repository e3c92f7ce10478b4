"""An evaluation plugin of one's own: as good as before on held-out prompts, and not much longer.

A model that is rewarded by a lenient judge often learns to say more. `evaluation.options.most-growth` bounds the mean
length of the candidate's answers, as a multiple of the incumbent's (in characters).
"""

from __future__ import annotations

import math
from typing import Any

from reef.errors import ConfigError
from reef.recipe import EvaluationConfig, build_scorer
from reef.recipe.evaluation import HeldOutEvaluator, load_prompts
from reef.runtime.interfaces import (
    Candidate,
    CandidateSampler,
    Decision,
    Evaluation,
    Evaluator,
    SamplingParams,
    TrainingRuntime,
)


class BoundedLength(Evaluator):
    """`held-out` does the asking; this listens to the answers as they pass."""

    def __init__(self, held_out: HeldOutEvaluator, most_growth: float) -> None:
        self._held_out = held_out
        self._most_growth = most_growth

    async def evaluate(self, candidate: Candidate, sampler: CandidateSampler) -> Evaluation:
        measured = _Measured(sampler)
        evaluation = await self._held_out.evaluate(candidate, measured)
        incumbent, new = (math.fsum(measured.lengths[side]) / len(measured.lengths[side]) for side in (False, True))
        growth = new / max(incumbent, 1.0)
        return Evaluation(scores={**evaluation.scores, "length_growth": growth})

    def decide(self, candidate: Candidate, evaluation: Evaluation) -> Decision:
        growth = evaluation.scores["length_growth"]
        if growth > self._most_growth:
            return Decision(
                False, f"answers grew by a factor of {growth:.2f}, at most {self._most_growth:g} is allowed"
            )
        return self._held_out.decide(candidate, evaluation)


class _Measured(CandidateSampler):
    def __init__(self, sampler: CandidateSampler) -> None:
        self._sampler = sampler
        self.lengths: dict[bool, list[int]] = {False: [], True: []}

    async def chat(self, messages: list[dict[str, Any]], sampling: SamplingParams, *, candidate: bool) -> str:
        answer = await self._sampler.chat(messages, sampling, candidate=candidate)
        self.lengths[candidate].append(len(answer))
        return answer


def build(config: EvaluationConfig, runtime: TrainingRuntime | None) -> BoundedLength:
    """Reads the same settings as `held-out`, and `options.most-growth` (default 1.5)."""
    growth = config.options.get("most-growth", 1.5)
    if isinstance(growth, bool) or not isinstance(growth, int | float) or not growth > 0:
        raise ConfigError(f"evaluation.options.most-growth must be a number > 0, got {growth!r}")
    return BoundedLength(HeldOutEvaluator(config, load_prompts(config), build_scorer(config.scorer)), growth)
