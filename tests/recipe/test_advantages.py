from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.recipe.advantages import RunningBaseline, group_relative, leave_one_out

scores = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20)
decays = st.floats(0.0, 0.999)


def test_group_relative_by_hand() -> None:
    assert group_relative([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert group_relative([3.0, 0.0]) == [1.5, -1.5]
    # mean 2, deviations -2, 0, 2: variance 8/3
    assert group_relative([0.0, 2.0, 4.0], normalize=True) == pytest.approx([-math.sqrt(1.5), 0.0, math.sqrt(1.5)])


def test_leave_one_out_by_hand() -> None:
    assert leave_one_out([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert leave_one_out([3.0, 0.0]) == [3.0, -3.0]


def test_leave_one_out_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match=">= 2 scores, got 1"):
        leave_one_out([1.0])


@given(score=st.floats(-1e9, 1e9), count=st.integers(2, 50), normalize=st.booleans())
def test_equal_scores_are_exactly_zero(score: float, count: int, normalize: bool) -> None:
    assert group_relative([score] * count, normalize) == [0.0] * count
    assert leave_one_out([score] * count, normalize) == [0.0] * count


@given(scores)
def test_advantages_sum_to_zero(values: list[float]) -> None:
    scale = max(map(abs, values)) + 1.0
    assert math.fsum(group_relative(values)) == pytest.approx(0.0, abs=1e-9 * scale)
    assert math.fsum(leave_one_out(values)) == pytest.approx(0.0, abs=1e-9 * scale)


@given(scores, st.floats(-1e6, 1e6))
def test_advantages_ignore_a_shift(values: list[float], shift: float) -> None:
    moved = [value + shift for value in values]
    assert group_relative(moved) == pytest.approx(group_relative(values), abs=1e-6)
    assert leave_one_out(moved) == pytest.approx(leave_one_out(values), abs=1e-6)


@given(scores)
def test_leave_one_out_is_the_score_minus_the_mean_of_the_others(values: list[float]) -> None:
    others = [(math.fsum(values) - value) / (len(values) - 1) for value in values]
    expected = [value - other for value, other in zip(values, others, strict=True)]
    assert leave_one_out(values) == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.integers(-1000, 1000).map(float), min_size=2, max_size=20))
def test_normalized_advantages_have_unit_deviation(values: list[float]) -> None:
    normalized = group_relative(values, normalize=True)
    square = math.fsum(value * value for value in normalized) / len(values)
    assert square == pytest.approx(0.0 if min(values) == max(values) else 1.0)


def test_baseline_by_hand() -> None:
    first = RunningBaseline().updated([1.0], decay=0.5)
    assert (first.mean, first.variance, first.weight) == (1.0, 0.0, 0.5)
    # keep 0.25: weight 0.125 + 0.75 = 0.875; share 6/7 of the batch (mean 2, variance 4), 1/7 of the past (mean 1)
    second = first.updated([0.0, 4.0], decay=0.5)
    assert second.weight == 0.875
    assert second.mean == pytest.approx(1 / 7 * 1 + 6 / 7 * 2)
    assert second.variance == pytest.approx(6 / 7 * 4 + 6 / 49 * 1)


def test_baseline_is_the_weighted_mean_of_all_scores() -> None:
    baseline = RunningBaseline()
    seen = [0.3, 0.9, 0.1, 0.5]
    for score in seen:
        baseline = baseline.updated([score], decay=0.9)
    weights = [0.9**age for age in (3, 2, 1, 0)]
    mean = sum(w * s for w, s in zip(weights, seen, strict=True)) / sum(weights)
    assert baseline.mean == pytest.approx(mean)
    variance = sum(w * (s - mean) ** 2 for w, s in zip(weights, seen, strict=True)) / sum(weights)
    assert baseline.variance == pytest.approx(variance)


def test_first_scores_are_compared_with_their_own_mean() -> None:
    before = RunningBaseline()
    after = before.updated([1.0, 0.0], decay=0.9)
    assert before.advantages([1.0, 0.0], after) == [0.5, -0.5]


def test_later_scores_are_compared_with_the_past_only() -> None:
    before = RunningBaseline(mean=0.25, variance=0.1, weight=0.9)
    after = before.updated([1.0, 0.0], decay=0.9)
    assert before.advantages([1.0, 0.0], after) == [0.75, -0.25]


def test_rounding_is_no_signal() -> None:
    baseline = RunningBaseline()
    for _ in range(100):
        baseline = baseline.updated([0.1], decay=0.95)
    assert baseline.advantages([0.1], baseline.updated([0.1], 0.95)) == [0.0]


@given(decay=st.floats(0.5, 0.99), score=st.floats(-1e3, 1e3), jump=st.floats(1e-3, 1e3))
def test_a_surprise_after_equal_scores_stays_bounded(decay: float, score: float, jump: float) -> None:
    before = RunningBaseline().updated([score] * 1000, decay)
    [advantage] = before.advantages([score + jump], before.updated([score + jump], decay), normalize=True)
    assert abs(advantage) <= 1 / math.sqrt(decay * (1 - decay)) + 1e-6


@given(st.lists(st.floats(-1e9, 1e9), max_size=30), decays)
def test_state_survives_json(values: list[float], decay: float) -> None:
    baseline = RunningBaseline().updated(values, decay)
    assert RunningBaseline.from_json(baseline.to_json()) == baseline
    assert all(map(math.isfinite, baseline.to_json().values()))


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30), decays)
def test_baseline_stays_within_the_scores(values: list[float], decay: float) -> None:
    baseline = RunningBaseline()
    for value in values:
        baseline = baseline.updated([value], decay)
    slack = 1e-9 * max(map(abs, values)) + 1e-9
    assert min(values) - slack <= baseline.mean <= max(values) + slack
    assert baseline.variance >= 0.0
