"""The examples in `recipes/` work as their README says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from reef.errors import ConfigError
from reef.recipe import EvaluationConfig, RecipeConfig, build_evaluator, build_recipe, build_scorer
from reef.recipe.evaluation import load_prompts
from tests.recipe.exchanges import record, report
from tests.recipe.test_evaluation import CANDIDATE, FakeSampler

EXAMPLES = Path(__file__).parents[2] / "recipes"
PROMPTS = str(EXAMPLES / "sentiment.jsonl")


def signal(scores: dict[str, float], **settings):
    recipe = build_recipe(RecipeConfig(name=f"{EXAMPLES}/imitate_best.py", batch_size=len(scores), **settings))
    processor = recipe.processor({})
    for sequence, (name, score) in enumerate(scores.items()):
        processor.ingest(report(f"report-{name}", name, score=score, sequence=sequence), {name: record(name)})
    return recipe.prepare(processor.build(0.0))


def test_imitate_best_keeps_the_better_answers() -> None:
    step = signal({"good": 1.0, "fair": 0.6, "bad": 0.0})
    assert [(sample.record_id, sample.advantages) for sample in step.samples] == [
        ("good", [1.0] * 3),
        ("fair", [1.0] * 3),
    ]
    assert (step.objective.name, step.metrics["imitated"]) == ("cross_entropy", 2.0)
    stricter = signal({"good": 1.0, "fair": 0.6, "bad": 0.0}, options={"least-advantage": 0.3})
    assert [sample.record_id for sample in stricter.samples] == ["good"]


def test_imitate_best_names_an_objective_that_the_trainer_knows() -> None:
    pytest.importorskip("torch")
    from reef.train.objectives import lookup

    lookup(signal({"good": 1.0, "bad": 0.0}).objective)


def test_imitate_best_refuses_a_bad_option() -> None:
    with pytest.raises(ConfigError, match="least-advantage must be a number >= 0, got -1"):
        signal({"a": 1.0}, options={"least-advantage": -1})


def test_default_objective_is_one_that_the_trainer_knows() -> None:
    pytest.importorskip("torch")
    from reef.runtime.interfaces import Objective
    from reef.train.objectives import lookup

    lookup(Objective(RecipeConfig().objective, RecipeConfig().objective_params))


@pytest.mark.parametrize(
    ("answer", "expected"), [("Positive.", 1.0), ("positive, I think", 0.6), ("It is positive", 0.3), ("great", 0.0)]
)
def test_graded_word(answer, expected) -> None:
    assert build_scorer(f"{EXAMPLES}/graded_word.py:score")(answer, "positive") == expected


def test_sentiment_prompts_load() -> None:
    prompts = load_prompts(EvaluationConfig(plugin="held-out", prompts=PROMPTS))
    assert {prompt.expected for prompt in prompts} == {"positive", "negative"}
    assert len({prompt.conversation()[-1]["content"] for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize(("suffix", "selected"), [("", True), (" indeed, and let me say more about it", False)])
def test_bounded_length_rejects_answers_that_grow(suffix, selected) -> None:
    config = EvaluationConfig(
        plugin=f"{EXAMPLES}/bounded_length.py",
        prompts=PROMPTS,
        scorer=f"{EXAMPLES}/graded_word.py:score",
        margin=1.0,
    )
    said = [prompt.conversation()[-1]["content"] for prompt in load_prompts(config)]
    sampler = FakeSampler(dict.fromkeys(said, "positive"), dict.fromkeys(said, "positive" + suffix))
    evaluator = build_evaluator(config)
    decision = evaluator.decide(CANDIDATE, asyncio.run(evaluator.evaluate(CANDIDATE, sampler)))
    assert decision.selected is selected
    assert selected or "grew by a factor" in decision.reason
