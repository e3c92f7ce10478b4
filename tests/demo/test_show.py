from __future__ import annotations

import io

import pytest
from rich.console import Console

from reef.demo.agent import Graded, Step
from reef.demo.show import Screen, TrainingView, chart, duration, save_curve
from reef.demo.task import Example

EXAMPLE = Example("The [soup] was good.", "positive")


def step(number: int, score: float, outcome: str = "trained", **metrics: object) -> Step:
    return Step(
        number=number,
        sample=Graded(EXAMPLE, "[/] positive", "receipt", 0.6, 3),
        mean_score=score,
        tokens=120,
        answer_seconds=2.0,
        learn_seconds=3.0,
        outcome=outcome,
        reason="worse" if outcome == "rejected" else "",
        release=number,
        metrics=metrics,
    )


def screen(terminal: bool) -> tuple[Screen, io.StringIO]:
    written = io.StringIO()
    return Screen(6, Console(file=written, force_terminal=terminal, width=100)), written


def test_chart_draws_full_half_and_empty_bars():
    lines = chart([1.0, 0.5, 0.0], slots=3, height=2)
    assert lines == ["1.0 │███         ", "0.0 │███ ███ ▁▁▁ ", "    └────────────"]


def test_chart_clips_scores_and_fits_many_steps():
    assert chart([7.0, -1.0], slots=2) == chart([1.0, 0.0], slots=2)
    assert max(len(line) for line in chart([0.5] * 70, slots=70)) <= 80


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3600, "60:00")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_without_a_terminal_every_step_is_one_plain_line():
    shown, written = screen(terminal=False)
    with TrainingView(shown, 2) as view:
        view.add(step(1, 0.25))
        view.add(step(2, 0.75, "rejected"))
    assert written.getvalue().splitlines() == [
        "    step 1/2  mean score 0.25  60 tokens/s, learned in 3.0 s: release 1, 0:05 left",
        "    step 2/2  mean score 0.75  60 tokens/s, learned in 3.0 s: rejected worse, 0:00 left",
    ]


def test_a_terminal_shows_step_score_speed_time_left_and_curve():
    shown, written = screen(terminal=True)
    with TrainingView(shown, 4) as view:
        view.note("asking [64]")
        view.add(step(1, 0.25))
    text = written.getvalue()
    for expected in ("step 2/4", "0.25", "60 tokens/s", "0:15 left", "asking [64]", "[/] positive", "1.0 │"):
        assert expected in text


def test_answers_of_the_model_are_shown_literally():
    shown, written = screen(terminal=False)
    shown.answers("title", [Graded(EXAMPLE, "[red]pos[/]\n", "receipt", 0.0, 3)])
    assert "The [soup] was good." in written.getvalue()
    assert r"'[red]pos[/]\n'" in written.getvalue()


def test_chain_names_the_source_of_a_rollback():
    shown, written = screen(terminal=False)
    base = {"release_id": "r0", "number": 0, "kind": "base", "content_id": "base:aa", "runtime_load_id": "engine:0"}
    rest = {"source_release_id": None, "metrics": {}}
    trained = {**base, **rest, "release_id": "r1", "number": 1, "kind": "trained", "metrics": {"mean_score": 0.5}}
    rolled = {**base, **rest, "release_id": "r2", "number": 2, "kind": "rollback", "source_release_id": "r0"}
    shown.chain([{**base, **rest}, trained, rolled])
    lines = written.getvalue().splitlines()
    assert "mean 0.50" in lines[2]
    assert "content of release 0" in lines[3]


def test_curve_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    steps = [step(1, 0.2, evaluation={"candidate_mean": 0.3}), step(2, 0.8, "no_signal")]
    save_curve(tmp_path / "curve.png", steps, 0.2, 0.9, seed=0)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
