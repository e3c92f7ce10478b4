"""The main job on real parts: serve, record, report, train, publish, survive kill -9, roll back; proven by re-scoring.

Each case runs `reef serve` on the tiny model (float32) as a user would, and judges it from outside.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft", "openai")

import torch  # noqa: E402
from openai import OpenAI  # noqa: E402

from reef.demo.server import Server  # noqa: E402
from reef.runtime.interfaces import MarkerState  # noqa: E402
from reef.runtime.recovery import MarkerFile  # noqa: E402

PROMPT = [{"role": "user", "content": "Tell me about the reef."}]
LONG = 2500  # tokens of an answer during which a release is published


class Reef:
    """One deployment on one data directory; may be started, killed and started again."""

    patience = 200.0  # seconds for a step

    def __init__(self, model: Path, directory: Path, **flags: object) -> None:
        self.model, self.directory = model, directory
        self.flags = {
            "inference.model-path": model,
            "inference.threads": 1,
            "inference.health-timeout": 60,  # a busy machine may give an engine nothing for 10 s; here they are killed
            "inference.kv-cache-tokens": 4096,
            "training.backend": "torch",
            "training.threads": 1,
            "training.learning-rate": 0.01,
            "recipe.batch-size": 4,
            "reef.data-dir": directory / "data",
            "reef.port": 0,
            **flags,
        }
        self.runs = 0

    def start(self, seconds: float = 240) -> None:
        self.runs += 1
        arguments = [f"--{key}={value}" for key, value in self.flags.items()]
        self.server = Server(arguments, self.directory / f"server-{self.runs}.log")
        self.server.start()
        for _ in self.server.starting(seconds):
            pass
        self.http = httpx.Client(base_url=self.server.url, timeout=200)
        self.openai = OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, timeout=200)

    def kill(self) -> list[int]:
        """SIGKILL the service; return its children's pids."""
        assert self.server._process is not None
        children = self.children()
        self.server._process.kill()
        self.server._process.wait()
        assert len(children) == 2
        return list(children)

    def children(self) -> dict[int, bytes]:
        """Pids of the workers, with their command lines."""
        tasks = Path(f"/proc/{self.server._process.pid}/task").iterdir()
        pids = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        return {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}

    def ask(self, seed: int = 0, temperature: float = 1.0, max_tokens: int = 12) -> tuple[str, str]:
        """Return the receipt and the text."""
        raw = self.openai.chat.completions.with_raw_response.create(
            model="any", messages=PROMPT, max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        answer = raw.parse().choices[0].message.content
        return raw.headers["x-reef-agent-record-id"], answer or ""

    def report(self, receipt: str, score: float) -> None:
        self.http.post("/reef/report", json={"score": score, "references": [receipt]}).raise_for_status()

    @contextmanager
    def running(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.server.stop()

    def lesson(self, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
        """Four answers, `meanwhile`, and scores 0, 1, 0, 1; return the receipts."""
        receipts = [self.ask(seed=seed)[0] for seed in range(4)]
        meanwhile()
        for index, receipt in enumerate(receipts):
            self.report(receipt, float(index % 2))
        return receipts

    def teach(self, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
        """A lesson; return its receipts once a release came of it."""
        before = self.head()["number"]
        receipts = self.lesson(meanwhile)
        deadline = time.monotonic() + self.patience
        while self.head()["number"] == before:
            assert time.monotonic() < deadline, self.status()
            time.sleep(0.1)
        return receipts

    def status(self) -> dict[str, Any]:
        return self.http.get("/reef/status").json()

    def head(self) -> dict[str, Any]:
        return self.status()["scenarios"][0]["head"]

    def records(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            query = {
                "kind": "inference",
                "detail": "full",
                "limit": 100,
                "after": found[-1]["sequence"] if found else 0,
            }
            page = self.http.get("/reef/scenarios/default/records", params=query).json()["records"]
            if not page:
                return found
            found += page

    def verify(self, **environment: str) -> dict[str, Any]:
        """What `reef verify` says of the data directory; it must be clean."""
        command = [sys.executable, "-m", "reef.cli", "verify", "--data-dir", self.directory / "data", "--json"]
        env = {**os.environ, **environment}
        done = subprocess.run(command, cwd=self.directory, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr
        return next(one for one in json.loads(done.stdout)["scenarios"] if one["scenario"] == "default")

    def releases(self) -> list[dict[str, Any]]:
        return self.http.get("/reef/scenarios/default/releases").json()["releases"]


CASES = [("lora", "in_place"), ("full", "retract")]


@contextmanager
def serving(model: Path, directory: Path, case: tuple[str, str]) -> Iterator[Reef]:
    made = Reef(model, directory, **{"training.mode": case[0], "inference.pause-mode": case[1]})
    with made.running():
        yield made


@pytest.fixture(params=CASES, ids="-".join)
def reef(request, tiny_model: Path, tmp_path: Path) -> Iterator[Reef]:
    with serving(tiny_model, tmp_path, request.param) as made:
        yield made


@pytest.fixture(params=CASES, ids="-".join, scope="module")
def shared(request, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reef]:
    """One for the tests below that leave it serving."""
    with serving(tiny_model, tmp_path_factory.mktemp("shared"), request.param) as made:
        yield made


def weights_of(reef: Reef, release: dict[str, Any]) -> torch.nn.Module:
    """What a release names, loaded from the data directory by transformers and peft alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    content = reef.directory / "data" / "artifacts" / "contents" / release["content_id"]
    if (content / "adapter_config.json").exists():
        base = AutoModelForCausalLM.from_pretrained(reef.model, dtype=torch.float32)
        return PeftModel.from_pretrained(base, content).eval()
    return AutoModelForCausalLM.from_pretrained(content if content.exists() else reef.model, dtype=torch.float32).eval()


@torch.no_grad()
def worst_difference(reef: Reef) -> tuple[float, set[str]]:
    """Re-score every answer of one span under the weights that it names: worst |nat| off, and the loads seen."""
    by_load = {release["runtime_load_id"]: release for release in reef.releases()}
    models = {load: weights_of(reef, release) for load, release in by_load.items()}
    worst, seen = 0.0, set()
    for record in reef.records():
        for generation in record["generations"]:
            spans = generation["spans"]
            assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
            assert not spans or spans[-1]["end"] == len(generation["output_ids"])
            assert {span["runtime_load_id"] for span in spans} <= set(by_load), "a span names no release"
            if len(spans) != 1:
                continue
            prompt, output = generation["prompt_ids"], generation["output_ids"]
            logits = models[spans[0]["runtime_load_id"]](torch.tensor([prompt + output])).logits[0].float()
            rows = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
            again = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
            worst = max(worst, (again - torch.tensor(generation["logprobs"])).abs().max().item())
            seen.add(spans[0]["runtime_load_id"])
    return worst, seen


def test_serve_learn_die_recover_and_roll_back(reef: Reef):
    _, base_answer = reef.ask(temperature=0.0)
    receipts = reef.teach()
    _, first_answer = reef.ask(temperature=0.0)
    receipts += reef.teach()
    receipts.append(reef.ask(seed=9)[0])
    head = reef.head()
    assert head["number"] == 2

    children = reef.kill()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "a worker outlived its owner"
        time.sleep(0.1)
    reef.start()

    assert reef.head() == head, "the last committed release serves again, under its own load ID"
    stored = {record["agent_record_id"] for record in reef.records()}
    assert set(receipts) <= stored, "an acknowledged receipt is lost"
    reef.ask(seed=10)
    worst, loads = worst_difference(reef)
    assert worst < 1e-4 and loads == {release["runtime_load_id"] for release in reef.releases()}

    commits = reef.http.get("/reef/scenarios/default/commits").json()["commits"]
    consumed = [item["record_id"] for commit in commits for item in commit["consumed"]]
    assert len(consumed) == len(set(consumed)) == 16, "four records and four reports in each of two steps, once"

    first = reef.releases()[1]
    reef.http.post("/reef/scenarios/default/rollback", json={"release_id": first["release_id"]}).raise_for_status()
    assert reef.ask(temperature=0.0)[1] == first_answer
    reef.http.post("/reef/scenarios/default/rollback").raise_for_status()
    assert reef.ask(temperature=0.0)[1] == base_answer
    assert [release["number"] for release in reef.releases()] == [4, 3, 2, 1, 0]
    residency = reef.status()["residency"]
    kept = 2 if reef.flags["training.mode"] == "lora" else 0
    assert residency["used"] == kept, "adapters of older releases stay, full weights do not"
    assert sorted(load["state"] for load in residency["loads"]) == ["current"] + ["unused"] * kept
    answers = len(reef.records())
    reef.server.stop()
    verified = reef.verify()
    assert verified["answers"] == answers and all(release["tokens"] for release in verified["releases"])


def test_a_request_in_flight_continues_across_a_publication(shared: Reef):
    """The engine stands still while the trainer works: on a busy machine the answer might be complete by then."""
    reef = shared
    [engine] = [pid for pid, command in reef.children().items() if b"engine-0" in command]
    streams = []

    def begin() -> None:
        stream = reef.openai.chat.completions.create(
            model="any", messages=PROMPT, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}, seed=1
        )
        streams.append(iter(stream))
        next(streams[0])
        os.kill(engine, signal.SIGSTOP)
        threading.Thread(target=go_on_after_training).start()

    def go_on_after_training() -> None:
        marker = MarkerFile(reef.directory / "data" / "marker.json")
        while (found := marker.read()) is None or found.state is MarkerState.RUNNING:
            time.sleep(0.02)
        os.kill(engine, signal.SIGCONT)

    reef.teach(begin)
    for _ in streams[0]:
        pass
    crossing = next(r for r in reef.records() if len(r["generations"][0]["output_ids"]) == LONG)
    spans = crossing["generations"][0]["spans"]
    assert [span["runtime_load_id"] for span in spans] == ["engine:0", reef.head()["runtime_load_id"]]
    assert spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == LONG
    base, first = reef.verify()["releases"]  # while it serves
    kept = spans[1]["end"] - spans[1]["start"] if reef.flags["inference.pause-mode"] == "in_place" else 0
    assert (base["frozen_tokens"], first["frozen_tokens"]) == (0, kept)


def test_a_dead_engine_is_replaced_with_the_committed_weights(shared: Reef):
    reef = shared
    reef.teach()
    number = reef.head()["number"]
    _, answer = reef.ask(temperature=0.0)
    engine = next(pid for pid, command in reef.children().items() if b"engine-0" in command)
    os.kill(engine, signal.SIGKILL)
    deadline = time.monotonic() + 200
    while True:
        response = reef.http.post("/v1/chat/completions", json={"model": "any", "messages": PROMPT, "max_tokens": 1})
        if response.status_code == 200:
            break
        assert response.status_code == 503 and "retry-after" in response.headers, response.text
        assert time.monotonic() < deadline, "the engine was not replaced"
        time.sleep(0.2)
    assert reef.ask(temperature=0.0)[1] == answer
    assert reef.head()["number"] == number
    lines = dict(line.rsplit(" ", 1) for line in reef.http.get("/metrics").text.splitlines() if line[:1] != "#")
    assert float(lines['reef_component_restarts_total{component="engine"}']) == 1
    assert float(lines['reef_publications_total{kind="trained",scenario="default"}']) == number
    assert float(lines["reef_publication_pause_seconds_count"]) == float(lines["reef_training_seconds_count"]) == number
    assert float(lines['reef_prefix_prompt_tokens_total{scenario="default"}']) > 0, "of the engine that replaced it"
