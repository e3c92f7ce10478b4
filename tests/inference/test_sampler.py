"""Sampling against plain formulas, row by row."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from reef.inference.local.sampler import Row, sample, uniform
from reef.runtime.interfaces import SamplingParams

VOCAB = 1000  # not a multiple of the block


def row(
    seed: int = 1, position: int = 0, *, prompt: list[int] | None = None, output: list[int] | None = None, **params: Any
) -> Row:
    counts = None if output is None else np.bincount(output, minlength=VOCAB).astype(np.int32)
    return Row(SamplingParams(**params), seed, position, prompt or [], counts)


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draws(table: torch.Tensor, count: int, **params: Any) -> Any:
    """Sample one distribution at `count` positions."""
    return sample(table.expand(count, -1), [row(5, position, **params) for position in range(count)])


def test_greedy_takes_the_maximum_with_its_model_logprob():
    table = logits(3)
    sampled = sample(table, [row(temperature=0.0)] * 3)
    assert sampled.token_ids == table.argmax(-1).tolist()
    expected = table.log_softmax(-1).amax(-1)
    assert torch.allclose(torch.tensor(sampled.logprobs), expected.double().float(), atol=1e-5)
    assert sampled.sampled_logprobs == [0.0] * 3


def test_draws_follow_the_distribution():
    """Chi-square over the 20 likeliest tokens and the rest; 0.9999 quantile of 20 degrees of freedom is 52.4."""
    table = logits()
    count = 20_000
    sampled = draws(table, count, temperature=0.8)
    probabilities = (table[0] / 0.8).softmax(-1)
    top = probabilities.topk(20)
    seen = np.bincount(sampled.token_ids, minlength=VOCAB)
    expected = [*(top.values * count).tolist(), count * (1 - top.values.sum().item())]
    actual = [*seen[top.indices].tolist(), count - int(seen[top.indices].sum())]
    assert sum((a - e) ** 2 / e for a, e in zip(actual, expected, strict=True)) < 52.4


def test_logprobs_are_of_the_model_and_as_drawn():
    table = logits()
    sampled = draws(table, 50, temperature=0.5)
    model, drawn = table[0].log_softmax(-1), (table[0] / 0.5).log_softmax(-1)
    for token, logprob, sampled_logprob in zip(
        sampled.token_ids, sampled.logprobs, sampled.sampled_logprobs, strict=True
    ):
        assert logprob == pytest.approx(model[token].item(), abs=1e-5)
        assert sampled_logprob == pytest.approx(drawn[token].item(), abs=1e-5)


def kept_by(table: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """The tokens that survive, by definition and slowly."""
    probabilities = table.double().softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    order = [token for token in order if probabilities[token] >= min_p * probabilities.max()]
    order = order[: top_k or None]
    total, running, kept = sum(probabilities[order].tolist()), 0.0, set()
    for token in order:
        if kept and running >= top_p * total:
            break
        kept.add(token)
        running += probabilities[token].item()
    return kept


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.5},
        {"top_p": 0.99999},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.7},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
        {"top_p": 1e-9},
        {"top_k": 5000},
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_truncation_keeps_what_it_should(limits, flat):
    table = logits() * (0.05 if flat else 1.0)
    kept = kept_by(table[0], **limits)
    sampled = draws(table, 3000, temperature=1.0, **limits)
    assert set(sampled.token_ids) <= kept
    if len(kept) < 50:
        assert set(sampled.token_ids) == kept
    mass = table[0].double().softmax(-1)[sorted(kept)].sum().log().item()
    for logprob, drawn in zip(sampled.logprobs, sampled.sampled_logprobs, strict=True):
        assert drawn == pytest.approx(logprob - mass, abs=1e-4)


def test_rows_of_a_batch_do_not_see_each_other():
    table = logits(6, seed=3)
    rows = [
        row(1, 5, temperature=0.0),
        row(2, 6, temperature=1.0),
        row(3, 7, temperature=0.7, top_k=5),
        row(4, 8, temperature=1.3, top_p=0.4),
        row(5, 9, temperature=1.0, output=[1, 2, 2], presence_penalty=1.0),
        row(6, 10, temperature=0.0, logit_bias={17: 100.0}, top_logprobs=3),
    ]
    together = sample(table, rows)
    for index, one in enumerate(rows):
        alone = sample(table[index : index + 1], [one])
        assert together.token_ids[index] == alone.token_ids[0]
        assert together.sampled_logprobs[index] == pytest.approx(alone.sampled_logprobs[0], abs=1e-6)
    assert together.token_ids[5] == 17
    assert [len(top) for top in together.top_logprobs] == [0, 0, 0, 0, 0, 3]


def test_penalties_by_hand():
    table = torch.zeros(1, VOCAB)
    table[0, :4] = torch.tensor([8.0, 7.5, -1.0, 7.0])

    def winner(**params: Any) -> int:
        return sample(table, [row(temperature=0.0, **params)]).token_ids[0]

    assert winner(output=[]) == 0
    assert winner(output=[0], presence_penalty=0.4) == 0
    assert winner(output=[0], presence_penalty=0.6) == 1
    assert winner(output=[0, 0, 0], presence_penalty=0.1, frequency_penalty=0.2) == 1  # 8 - 0.1 - 0.6
    assert winner(output=[0], frequency_penalty=0.4) == 0
    assert winner(output=[], prompt=[0], repetition_penalty=1.2) == 1  # 8 / 1.2
    assert winner(output=[1], prompt=[0], repetition_penalty=1.2) == 3
    assert winner(output=[], prompt=[0], presence_penalty=5.0) == 0  # the prompt does not count
    negative = sample(table - 100, [row(temperature=1.0, output=[0], prompt=[1, 2, 3], repetition_penalty=2.0)])
    assert negative.token_ids[0] > 3  # negative logits are multiplied


def test_model_logprob_ignores_bias_and_penalty():
    table = logits()
    sampled = sample(table, [row(temperature=1.0, logit_bias={3: 200.0}, output=[3], presence_penalty=1.0)])
    assert sampled.token_ids == [3]
    assert sampled.logprobs[0] == pytest.approx(table[0].log_softmax(-1)[3].item(), abs=1e-5)
    assert sampled.sampled_logprobs[0] == pytest.approx(0.0, abs=1e-6)


def test_extreme_temperatures_stay_finite():
    table = logits() * 100
    cold = draws(table, 20, temperature=1e-30)
    assert set(cold.token_ids) == {int(table.argmax())}
    hot = draws(table, 200, temperature=1e30)
    assert len(set(hot.token_ids)) > 150
    assert all(math.isfinite(value) for value in hot.sampled_logprobs + cold.sampled_logprobs)


def test_a_token_without_weight_is_never_drawn():
    table = torch.full((1, VOCAB), -math.inf)
    table[0, [0, 127, 128, 999]] = 0.0
    assert set(draws(table, 4000, temperature=1.0).token_ids) == {0, 127, 128, 999}


def test_not_a_number_comes_back_as_such():
    table = logits(2)
    table[0, 5] = math.nan
    sampled = sample(table, [row(temperature=1.0), row(temperature=1.0)])
    assert math.isnan(sampled.logprobs[0])
    assert math.isfinite(sampled.logprobs[1])


def test_uniform_numbers_are_uniform_and_unrelated():
    many = np.array([uniform([seed] * 200, range(200)) for seed in range(200)])
    assert ((many >= 0) & (many < 1)).all()
    counts = np.histogram(many, bins=50, range=(0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 102  # chi-square, 49 degrees of freedom, 0.99999 quantile
    assert abs(np.corrcoef(many[:, :-1].ravel(), many[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(many[:-1].ravel(), many[1:].ravel())[0, 1]) < 0.03
    assert uniform([-1], [3])[0] == uniform([2**64 - 1], [3])[0]
