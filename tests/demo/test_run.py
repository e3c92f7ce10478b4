from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("openai")

from reef.demo import run
from reef.demo.agent import Graded, Step
from reef.demo.run import Options, Outcome, _conclude
from reef.demo.server import Server
from reef.demo.show import Screen
from reef.demo.task import held_out_examples

EXAMPLES = held_out_examples(0)


def graded(answer: str, score: float) -> list[Graded]:
    return [Graded(example, answer, "receipt", score, 3) for example in EXAMPLES]


def conclude(tmp_path: Path, after: float, rolled_back: str) -> tuple[int, dict, str]:
    sample = graded("positive", 1.0)[0]
    step = Step(1, sample, 0.5, 100, 2.0, 3.0, "trained", "", 1, {"grad_norm": 0.1})
    outcome = Outcome(
        before=graded("base", 0.2),
        steps=[step],
        after=graded("new", after),
        rolled_back=graded(rolled_back, 0.2),
        releases=[{"release_id": "r0", "number": 0, "metrics": {"much": 1}}],
        feedback_count=64,
    )
    written = io.StringIO()
    options = Options(seed=3, steps=1, output=tmp_path, keep=False)
    code = _conclude(Screen(6, Console(file=written)), options, outcome, 12.34)
    return code, json.loads((tmp_path / "report.json").read_text()), written.getvalue()


def test_a_rise_of_half_and_the_same_base_is_success(tmp_path):
    code, report, shown = conclude(tmp_path, after=0.7, rolled_back="base")
    assert code == 0
    assert report["held_out_before"] == pytest.approx(0.2)
    assert report["held_out_after"] == pytest.approx(0.7)
    assert report["held_out_after_rollback"] == pytest.approx(0.2)
    assert (report["feedback_count"], report["seconds"], report["seed"]) == (64, 12.3, 3)
    assert report["releases"] == [{"release_id": "r0", "number": 0}]
    assert "learned" in shown
    assert (tmp_path / "curve.png").exists()


def test_a_smaller_rise_fails(tmp_path):
    code, _, shown = conclude(tmp_path, after=0.69, rolled_back="base")
    assert code == 1
    assert "below the 0.5" in shown


def test_another_answer_after_the_rollback_fails(tmp_path):
    code, report, shown = conclude(tmp_path, after=1.0, rolled_back="bass")
    assert code == 1
    assert report["rollback_answers_equal"] is False
    assert "0 of 32 greedy answers are not the base's" in shown


def test_one_step_on_the_real_model_publishes_and_rolls_back_but_is_not_enough(smollm2, tmp_path):
    assert run.main(seed=0, steps=1, output=tmp_path, keep=True) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert [release["kind"] for release in report["releases"]] == ["base", "trained", "rollback"]
    assert report["releases"][2]["content_id"] == report["releases"][0]["content_id"]
    assert report["rollback_answers_equal"] is True
    assert any(item["before"] != item["after"] for item in report["held_out"])
    assert report["feedback_count"] == 64
    assert (tmp_path / "data" / "reef.db").exists()
    assert wait_for_none(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_stops_its_server(smollm2, tmp_path, number):
    command = [sys.executable, "-m", "reef.cli", "demo", "--output", str(tmp_path)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 240
        while not left_over(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.1)
        demo.send_signal(number)
        shown, _ = demo.communicate(timeout=240)
    finally:
        demo.kill()
    assert demo.returncode == 130, shown
    assert "interrupted" in shown
    assert wait_for_none(tmp_path) == []
    assert not (tmp_path / "data").exists()


def wait_for_none(directory: Path) -> list[int]:
    """What is left over after at most a minute; a killed process needs a moment to vanish."""
    deadline = time.monotonic() + 60
    while (found := left_over(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def left_over(directory: Path) -> list[int]:
    """Processes of a server, and its workers, that a demo with this output directory started."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if works_in(pid) == str(directory)]


def works_in(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def test_an_interrupt_while_the_server_is_born_leaves_it_known(monkeypatch, tmp_path):
    born = subprocess.Popen

    def interrupted(*args, **more):
        process = born([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        signal.raise_signal(signal.SIGINT)
        return process

    server = Server(["--config", "none"], tmp_path / "server.log")
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert server.alive
    server.stop()
    assert not server.alive
