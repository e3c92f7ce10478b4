"""`make gpu` where there is no GPU: it says so; and the same run on a CPU, one case of it."""

from __future__ import annotations

import json

from tests.conftest import needs

needs("torch", "transformers", "peft")

import torch  # noqa: E402

from gpu.__main__ import NO_GPU, main  # noqa: E402


def test_without_a_gpu_it_says_so_and_has_an_exit_code_of_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--report", str(tmp_path / "report.json")]) == NO_GPU not in (0, 1, 2)
    assert "no GPU" in capsys.readouterr().err and not (tmp_path / "report.json").exists()


def test_a_case_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "gpu" / "report.json"
    code = main(["--device", "cpu", "--case", "lora-bfloat16-resident", "--report", str(path)])
    report = json.loads(path.read_text())
    assert code == 0 and report["passed"], report
    assert json.loads(capsys.readouterr().out) == report
    (case,) = report["cases"]
    released = [one["released"] for one in case["memory"] if one["what"] == "engines release"]
    assert [sorted(one) for one in released] == [["kv_cache", "weights"], ["kv_cache"], ["kv_cache"]]
    assert len(case["step_seconds"]) == 2 and case["tokens"] > 0 and case["probe_difference"] < 1.0
