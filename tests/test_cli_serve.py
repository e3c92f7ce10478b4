"""`reef serve` as a process of its own, and the other commands against it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import needs

TOKEN = "one-token"


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """URL and process of a Reef that serves the tiny model and records."""
    root = tmp_path_factory.mktemp("serve")
    (root / "reef.yaml").write_text(f"inference:\n  model-path: {tiny_model}\n  threads: 1\n  kv-cache-tokens: 2048\n")
    log = root / "log"
    environment = {**os.environ, "REEF_REEF__TOKENS": TOKEN}
    command = [sys.executable, "-m", "reef.cli", "serve", "--reef.port", "0", "--reef.data-dir", "data"]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=sink, stderr=subprocess.STDOUT)
    try:
        yield ready_url(log, process), process
    finally:
        process.kill()
        process.wait(60)


def ready_url(log: Path, process: subprocess.Popen[bytes], seconds: float = 240.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("reef: ready at "):
                return line.removeprefix("reef: ready at ").split(",")[0]
        time.sleep(0.1)
    raise AssertionError(f"reef serve is not ready:\n{log.read_text()}")


@pytest.fixture
def reef(served: tuple[str, subprocess.Popen[bytes]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run one command against the served Reef."""

    def reef(*arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "reef.cli", *arguments]
        environment = {**os.environ, "REEF_URL": served[0], "REEF_TOKEN": token}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)

    return reef


def ask(url: str) -> str:
    """Ask for one short answer; return its receipt."""
    needs("openai")
    from openai import OpenAI

    with OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as client:
        answer = client.chat.completions.with_raw_response.create(
            model=client.models.list().data[0].id, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
    return answer.headers["x-reef-agent-record-id"]


Reef = Callable[..., subprocess.CompletedProcess[str]]


def test_ask_report_and_export(served: tuple[str, subprocess.Popen[bytes]], reef: Reef) -> None:
    receipt = ask(served[0])
    stored = reef("report", receipt, "--score", "0.5", "--metadata", '{"group": "g"}')
    assert stored.stdout.startswith("stored as "), stored.stderr
    records = [json.loads(line) for line in reef("records").stdout.splitlines()]
    assert [record["kind"] for record in records] == ["inference", "report"]
    assert records[0]["agent_record_id"] == receipt and len(records[0]["generations"][0]["output_ids"]) > 0
    assert records[1]["references"] == [receipt] and records[1]["score"] == 0.5
    assert len(reef("records", "--kind", "report").stdout.splitlines()) == 1


def test_status_and_releases(reef: Reef) -> None:
    status = json.loads(reef("status", "--json").stdout)
    assert status["default_scenario"] == "default"
    assert "default: serves release 0 (base, engine:0)" in reef("status").stdout
    releases = json.loads(reef("releases", "--json").stdout)["releases"]
    assert [release["kind"] for release in releases] == ["base"]
    assert reef("releases").stdout.startswith(f"0\t{releases[0]['release_id']}\tbase\t")


def test_refusals_come_in_the_servers_words(reef: Reef) -> None:
    for command, words in (
        (["report", "rec_unknown", "--score", "1"], "rec_unknown"),
        (["releases", "--scenario", "nowhere"], "nowhere"),
        (["rollback"], "nothing to roll back to"),
        (["rollback", "rel_unknown"], "rel_unknown"),
    ):
        done = reef(*command)
        assert done.returncode == 1 and done.stdout == ""
        assert words in done.stderr and done.stderr.count("\n") == 1
    assert "REEF_TOKEN" in reef("status", token="wrong").stderr


def test_an_interrupt_ends_it_cleanly(served: tuple[str, subprocess.Popen[bytes]]) -> None:
    process = served[1]
    process.send_signal(signal.SIGINT)
    assert process.wait(100) in (0, 130)
