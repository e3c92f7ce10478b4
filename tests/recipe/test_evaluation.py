from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest

from reef.errors import ConfigError, EngineError
from reef.recipe import EvaluationConfig, build_evaluator
from reef.recipe.evaluation import AlwaysEvaluator, HeldOutEvaluator, Prompt, contains, exact
from reef.runtime.interfaces import Candidate, CandidateSampler, Evaluation, SamplingParams, WeightKind

CANDIDATE = Candidate(
    job_id="job",
    scenario="s",
    content_id="c",
    state_id=None,
    kind=WeightKind.LORA,
    runtime_load_id="engine:1",
    probe_logprobs=[],
    incumbent_probe_logprobs=[],
)


class FakeSampler(CandidateSampler):
    """Answers from two tables keyed by what the user said; notes how many answers were asked for at a time."""

    def __init__(self, incumbent: dict[str, str], candidate: dict[str, str]) -> None:
        self.tables = {False: incumbent, True: candidate}
        self.asked: list[tuple[str, bool, SamplingParams]] = []
        self.running = self.most_running = 0

    async def chat(self, messages, sampling, *, candidate):
        said = messages[-1]["content"]
        self.asked.append((said, candidate, sampling))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        if said not in self.tables[candidate]:
            raise EngineError(f"no answer to {said}")
        return self.tables[candidate][said]


def held_out(tmp_path: Path, prompts: list[dict], **settings) -> HeldOutEvaluator:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, prompts)) + "\n\n")
    evaluator = build_evaluator(EvaluationConfig(plugin="held-out", prompts=str(file), **settings))
    assert isinstance(evaluator, HeldOutEvaluator)
    return evaluator


def run(evaluator, sampler) -> Evaluation:
    return asyncio.run(evaluator.evaluate(CANDIDATE, sampler))


QUESTIONS = [{"prompt": name, "expected": "yes"} for name in ("a", "b", "c", "d")]


def test_always_selects() -> None:
    evaluator = build_evaluator(EvaluationConfig())
    assert isinstance(evaluator, AlwaysEvaluator)
    assert evaluator.decide(CANDIDATE, run(evaluator, FakeSampler({}, {}))).selected


def test_better_candidate_is_selected_with_paired_numbers(tmp_path) -> None:
    sampler = FakeSampler(dict.fromkeys("abcd", "no"), {**dict.fromkeys("abc", "yes"), "d": "no"})
    evaluator = held_out(tmp_path, QUESTIONS)
    evaluation = run(evaluator, sampler)
    scores = evaluation.scores
    assert (scores["n"], scores["incumbent_mean"], scores["candidate_mean"]) == (4, 0.0, 0.75)
    assert scores["difference"] == 0.75
    # differences 1, 1, 1, 0: variance 0.25, over 4 prompts
    assert scores["paired_standard_error"] == pytest.approx(math.sqrt(0.25 / 4))
    decision = evaluator.decide(CANDIDATE, evaluation)
    assert decision.selected
    assert "0.7500, incumbent 0.0000 (+0.7500 ± 0.2500, n=4)" in decision.reason


def test_worse_candidate_is_rejected_and_shows_where(tmp_path) -> None:
    sampler = FakeSampler(dict.fromkeys("abcd", "yes"), {**dict.fromkeys("abc", "yes"), "d": "no"})
    evaluator = held_out(tmp_path, QUESTIONS)
    evaluation = run(evaluator, sampler)
    assert evaluation.scores["worst_regressions"] == [{"prompt": 3, "incumbent": 1.0, "candidate": 0.0}]
    assert not evaluator.decide(CANDIDATE, evaluation).selected


@pytest.mark.parametrize(("margin", "selected"), [(0.24, False), (0.25, True), (0.3, True)])
def test_margin_forgives(tmp_path, margin, selected) -> None:
    sampler = FakeSampler(dict.fromkeys("abcd", "yes"), {**dict.fromkeys("abc", "yes"), "d": "no"})
    evaluator = held_out(tmp_path, QUESTIONS, margin=margin)
    assert evaluator.decide(CANDIDATE, run(evaluator, sampler)).selected is selected


def test_rounding_does_not_reject(tmp_path) -> None:
    evaluator = held_out(tmp_path, QUESTIONS, margin=0.1)
    scores = {"difference": 0.7 - 0.8, "paired_standard_error": None, "candidate_mean": 0.7, "incumbent_mean": 0.8}
    assert scores["difference"] < -0.1
    assert evaluator.decide(CANDIDATE, Evaluation(scores={**scores, "n": 1})).selected


def test_asking_is_greedy_paired_and_bounded(tmp_path) -> None:
    answers = dict.fromkeys("abcd", "yes")
    sampler = FakeSampler(answers, answers)
    run(held_out(tmp_path, QUESTIONS, concurrency=3, max_tokens=9), sampler)
    assert sampler.most_running == 3
    assert sorted((said, candidate) for said, candidate, _ in sampler.asked) == [
        (said, candidate) for said in "abcd" for candidate in (False, True)
    ]
    assert {(sampling.temperature, sampling.max_tokens) for _, _, sampling in sampler.asked} == {(0.0, 9)}


def test_sampled_sides_share_their_seed(tmp_path) -> None:
    answers = dict.fromkeys("abcd", "yes")
    sampler = FakeSampler(answers, answers)
    run(held_out(tmp_path, QUESTIONS, temperature=0.7), sampler)
    seeds = {said: {sampling.seed for other, _, sampling in sampler.asked if other == said} for said in "abcd"}
    assert seeds == {"a": {0}, "b": {1}, "c": {2}, "d": {3}}


def test_engine_failure_fails_the_evaluation(tmp_path) -> None:
    with pytest.raises(EngineError, match="no answer to d"):
        run(held_out(tmp_path, QUESTIONS), FakeSampler(dict.fromkeys("abcd", "yes"), dict.fromkeys("abc", "yes")))


def test_non_finite_score_fails_the_evaluation(tmp_path) -> None:
    config = EvaluationConfig(plugin="held-out", prompts="unused")
    evaluator = HeldOutEvaluator(config, [Prompt(prompt="a")], lambda answer, expected: math.nan)
    with pytest.raises(ValueError, match="held-out prompt 0 must be finite, got nan"):
        run(evaluator, FakeSampler({"a": "x"}, {"a": "x"}))


def test_evaluation_that_hangs_fails(tmp_path) -> None:
    async def judge(answer, expected):
        await asyncio.sleep(30)

    config = EvaluationConfig(plugin="held-out", prompts="unused", timeout=0.05)
    with pytest.raises(TimeoutError):
        run(HeldOutEvaluator(config, [Prompt(prompt="a")], judge), FakeSampler({"a": "x"}, {"a": "x"}))


def test_async_scorer_is_awaited() -> None:
    async def judge(answer, expected):
        return len(answer)

    evaluator = HeldOutEvaluator(EvaluationConfig(plugin="held-out", prompts="unused"), [Prompt(prompt="a")], judge)
    scores = run(evaluator, FakeSampler({"a": "x"}, {"a": "xyz"})).scores
    assert (scores["difference"], scores["paired_standard_error"]) == (2.0, None)


def test_blocking_scorer_does_not_block_the_loop() -> None:
    import threading

    loop_thread = threading.get_ident()
    seen = []

    def judge(answer, expected):
        seen.append(threading.get_ident())
        return 1.0

    evaluator = HeldOutEvaluator(EvaluationConfig(plugin="held-out", prompts="unused"), [Prompt(prompt="a")], judge)
    run(evaluator, FakeSampler({"a": "x"}, {"a": "x"}))
    assert loop_thread not in seen


def test_builtin_scorers() -> None:
    assert [exact(" yes\n", "yes"), exact("Yes", "yes"), exact("yes!", "yes")] == [1.0, 0.0, 0.0]
    assert [contains("oh yes!", "yes"), contains("no", "yes")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "messages": [], "expected": "x"}', "prompts.jsonl:1: .*exactly one"),
        ('{"expected": "x"}', "prompts.jsonl:1: .*exactly one"),
        ('{"messages": [], "expected": "x"}', "messages must not be empty"),
        ('{"prompt": "a", "expect": "x"}', "prompts.jsonl:1: .*unknown field `expect`"),
        ('{"prompt": "a"}', 'needs "expected" to be a string'),
        ("not json", "prompts.jsonl:1"),
        ("", "must have at least one prompt"),
    ],
)
def test_bad_prompts_name_file_and_line(tmp_path, line, message) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=message):
        build_evaluator(EvaluationConfig(plugin="held-out", prompts=str(file)))


def test_missing_prompts_file_is_a_configuration_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        build_evaluator(EvaluationConfig(plugin="held-out", prompts=str(tmp_path / "none.jsonl")))
