"""The deployment's evaluation plugin: asks candidate and incumbent a question, then rejects one job in four."""

from __future__ import annotations

import hashlib

from reef.recipe.config import EvaluationConfig
from reef.runtime.interfaces import (
    Candidate,
    CandidateSampler,
    Decision,
    Evaluation,
    Evaluator,
    SamplingParams,
    TrainingRuntime,
)


class OneInFour(Evaluator):
    """The same verdict whenever the same job is judged again."""

    async def evaluate(self, candidate: Candidate, sampler: CandidateSampler) -> Evaluation:
        question = [{"role": "user", "content": "?"}]
        sampling = SamplingParams(max_tokens=4, temperature=0.0)
        answers = [await sampler.chat(question, sampling, candidate=side) for side in (False, True)]
        return Evaluation(scores={"answers": answers})

    def decide(self, candidate: Candidate, evaluation: Evaluation) -> Decision:
        rejected = hashlib.sha256(candidate.job_id.encode()).digest()[0] % 4 == 0
        return Decision(not rejected, "one in four" if rejected else "three in four")


def build(config: EvaluationConfig, runtime: TrainingRuntime | None) -> Evaluator:
    return OneInFour()
