"""Evaluation plugins: whether a candidate may serve. Anything that `evaluate` or `decide` raises rejects it."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from reef.errors import ConfigError
from reef.recipe.config import EvaluationConfig
from reef.runtime.interfaces import Candidate, CandidateSampler, Decision, Evaluation, Evaluator, SamplingParams

Scorer = Callable[[str, Any], float | Awaitable[float]]
"""(answer, expected) -> score, higher is better; plain ones run in a thread, so they may block."""

WORST_SHOWN = 5


class AlwaysEvaluator(Evaluator):
    """Selects every candidate."""

    async def evaluate(self, candidate: Candidate, sampler: CandidateSampler) -> Evaluation:
        return Evaluation()

    def decide(self, candidate: Candidate, evaluation: Evaluation) -> Decision:
        return Decision(True, "always")


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the prompts file: exactly one of `messages` and `prompt`, and what the scorer compares with."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    expected: Any = None

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError('must have exactly one of "messages" and "prompt"')
        if self.messages is not None and not self.messages:
            raise ValueError("messages must not be empty")

    def conversation(self) -> list[dict[str, Any]]:
        """Chat messages; a plain prompt is what the user says."""
        return self.messages or [{"role": "user", "content": self.prompt}]


class HeldOutEvaluator(Evaluator):
    """Asks incumbent and candidate the same prompts; rejects a candidate that is worse by more than the margin."""

    def __init__(self, config: EvaluationConfig, prompts: list[Prompt], scorer: Scorer) -> None:
        self._config = config
        self._prompts = prompts
        self._scorer = scorer

    async def evaluate(self, candidate: Candidate, sampler: CandidateSampler) -> Evaluation:
        """Raises what sampling or scoring raised first, ValueError for a score that is not finite, TimeoutError."""
        gate = asyncio.Semaphore(self._config.concurrency)
        try:
            async with asyncio.timeout(self._config.timeout), asyncio.TaskGroup() as tasks:
                pairs = [
                    [tasks.create_task(self._ask(index, sampler, gate, candidate=side)) for side in (False, True)]
                    for index in range(len(self._prompts))
                ]
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        incumbents = [incumbent.result() for incumbent, _ in pairs]
        candidates = [task.result() for _, task in pairs]
        return Evaluation(scores=self._summary(incumbents, candidates))

    def decide(self, candidate: Candidate, evaluation: Evaluation) -> Decision:
        scores = evaluation.scores
        difference, margin = scores["difference"], self._config.margin
        # The tolerance forgives rounding: 0.7 - 0.8 is a little less than -0.1.
        selected = difference >= -margin - 1e-9
        error = scores["paired_standard_error"]
        spread = "" if error is None else f" ± {error:.4f}"
        relation = "not worse" if selected else "worse"
        return Decision(
            selected,
            f"held-out mean {scores['candidate_mean']:.4f}, incumbent {scores['incumbent_mean']:.4f} "
            f"({difference:+.4f}{spread}, n={scores['n']}): {relation} by more than {margin:g}",
        )

    async def _ask(self, index: int, sampler: CandidateSampler, gate: asyncio.Semaphore, *, candidate: bool) -> float:
        prompt = self._prompts[index]
        sampling = SamplingParams(
            max_tokens=self._config.max_tokens,
            temperature=self._config.temperature,
            seed=index if self._config.temperature else None,  # the same luck for both sides
        )
        async with gate:
            answer = await sampler.chat(prompt.conversation(), sampling, candidate=candidate)
            score = await self._score(answer, prompt.expected)
        if not math.isfinite(score):
            raise ValueError(f"the score of held-out prompt {index} must be finite, got {score}")
        return score

    async def _score(self, answer: str, expected: Any) -> float:
        if inspect.iscoroutinefunction(self._scorer):
            return float(await self._scorer(answer, expected))
        result = await asyncio.to_thread(self._scorer, answer, expected)
        return float(await result if inspect.isawaitable(result) else result)

    def _summary(self, incumbents: list[float], candidates: list[float]) -> dict[str, Any]:
        n = len(incumbents)
        differences = [new - old for old, new in zip(incumbents, candidates, strict=True)]
        mean = math.fsum(differences) / n
        variance = math.fsum((value - mean) ** 2 for value in differences) / (n - 1) if n > 1 else None
        worst = sorted((index for index in range(n) if differences[index] < 0), key=differences.__getitem__)
        return {
            "n": n,
            "incumbent_mean": math.fsum(incumbents) / n,
            "candidate_mean": math.fsum(candidates) / n,
            "difference": mean,
            "paired_standard_error": None if variance is None else math.sqrt(variance / n),
            "margin": self._config.margin,
            "regressions": sum(1 for value in differences if value < 0),
            "improvements": sum(1 for value in differences if value > 0),
            "worst_regressions": [
                {"prompt": index, "incumbent": incumbents[index], "candidate": candidates[index]}
                for index in worst[:WORST_SHOWN]
            ],
        }


def load_prompts(config: EvaluationConfig) -> list[Prompt]:
    """Read `evaluation.prompts`. Raises ConfigError naming file and line."""
    path = Path(config.prompts or "")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"evaluation.prompts: cannot read {path}: {error}") from error
    prompts = [_prompt(line, f"{path}:{number}", config) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"evaluation.prompts: {path} must have at least one prompt, got none")
    return prompts


def _prompt(line: str, where: str, config: EvaluationConfig) -> Prompt:
    try:
        prompt = msgspec.json.decode(line, type=Prompt)
    except msgspec.DecodeError as error:
        raise ConfigError(f"evaluation.prompts: {where}: {error}") from error
    if config.scorer in ("exact", "contains") and not isinstance(prompt.expected, str):
        raise ConfigError(f'evaluation.prompts: {where}: scorer {config.scorer} needs "expected" to be a string')
    return prompt


def exact(answer: str, expected: str) -> float:
    """1.0 when equal, apart from white space at the ends."""
    return float(answer.strip() == expected.strip())


def contains(answer: str, expected: str) -> float:
    """1.0 when `expected` occurs in the answer."""
    return float(expected in answer)
