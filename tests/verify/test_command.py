from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft")

from reef.cli import main  # noqa: E402
from tests.verify.recording import Recording  # noqa: E402


@pytest.fixture(scope="module")
def recording(tiny_model, tmp_path_factory):
    made = Recording(tiny_model, tmp_path_factory.mktemp("verify") / "data")
    for number in range(3):
        made.ask(str(number), [number, *range(300, 320)], max_tokens=4)
    made.step()
    made.record()
    answer = made.answers["0"]
    made.append("edited", [replace(answer, logprobs=[0.0, *answer.logprobs[1:]])], created_at=1e9)
    return made


def verify(capsys, recording, *options: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--data-dir", str(recording.data), *options])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def test_an_edited_answer_exits_1_and_is_named(capsys, recording):
    code, shown = verify(capsys, recording)
    assert code == 1
    assert "reef: 4 answers re-scored" in shown and "  release 0 (base, engine:0): 16 tokens, mean" in shown
    assert "  edited: 1 of tokens 0 to 4 are off release 0 (engine:0), the first is token 0" in shown
    assert shown.splitlines()[-1].startswith("NOT what was recorded (tolerance 0.001 nat")


def test_a_time_range_without_it_exits_0(capsys, recording):
    code, shown = verify(capsys, recording, "--until", "2001-09-09T01:46:40", "--since", "1", "--json")
    report = json.loads(shown)
    assert code == 0 and report["clean"] and report["tolerance"] == 1e-3
    [scenario] = report["scenarios"]
    [release] = scenario["releases"]
    assert (scenario["answers"], scenario["problems"], release["tokens"], release["over"]) == (2, [], 8, 0)
    assert 0 < release["mean"] <= release["worst"] < 1e-4 and release["worst_record"] in ("1", "2")


def test_a_wide_tolerance_accepts(capsys, recording):
    assert verify(capsys, recording, "--tolerance", "100")[0] == 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--since", "yesterday"), 2, "neither Unix seconds nor a date"),
        (("--tolerance", "0"), 2, "tolerance"),
        (("--sample", "0"), 2, "sample"),
        (("--scenario", "nobody"), 1, "there is no scenario 'nobody'"),
    ],
)
def test_refusals(capsys, recording, options, code, message):
    got, shown = verify(capsys, recording, *options)
    assert got == code and message in shown
