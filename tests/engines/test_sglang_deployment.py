"""`reef serve` with a real SGLang engine: it learns, publishes, rolls back and replaces a dead engine; re-scored."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft", "openai")

from tests.engines.sglang import START_SECONDS  # noqa: E402
from tests.test_end_to_end import PROMPT, Reef, worst_difference  # noqa: E402

pytestmark = pytest.mark.timeout(4800)  # a server starts in half a minute, on a busy machine in many


class SGLangReef(Reef):
    """Waits longer."""

    patience = START_SECONDS

    def __init__(self, model: Path, directory: Path, **flags: object) -> None:
        super().__init__(model, directory, **flags)
        for local in ("inference.threads", "inference.kv-cache-tokens", "inference.health-timeout"):
            del self.flags[local]
        self.flags |= {
            "inference.backend": "sglang",
            "inference.device": "cpu",
            "inference.dtype": "float32",
            "inference.start-timeout": START_SECONDS,
        }

    def start(self, seconds: float = 2 * START_SECONDS) -> None:
        super().start(seconds)
        self.http.timeout = 300
        self.openai = self.openai.with_options(timeout=300)

    def scheduler(self) -> int:
        """Process id of the engine's scheduler, a descendant of the service's."""
        family = [self.server._process.pid]
        for pid in family:
            for task in Path(f"/proc/{pid}/task").iterdir():
                family += [int(child) for child in (task / "children").read_text().split()]
        return next(pid for pid in family if b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.fixture(params=["lora", "full"])
def reef(request, engine_python, tiny_model, tmp_path) -> Iterator[SGLangReef]:
    made = SGLangReef(tiny_model, tmp_path, **{"training.mode": request.param})
    with made.running():
        yield made


def test_learn_publish_roll_back_and_replace_a_dead_engine(reef: SGLangReef) -> None:
    _, base_answer = reef.ask(temperature=0.0)
    reef.teach()
    _, first_answer = reef.ask(temperature=0.0)
    reef.http.post("/reef/scenarios/default/rollback").raise_for_status()
    assert reef.ask(temperature=0.0)[1] == base_answer
    reef.teach()
    assert [release["number"] for release in reef.releases()] == [3, 2, 1, 0]
    _, answer = reef.ask(temperature=0.0)
    worst, loads = worst_difference(reef)
    assert worst < 1e-4 and loads == {release["runtime_load_id"] for release in reef.releases()}, worst
    verified = reef.verify()["releases"]
    assert all(release["tokens"] and release["worst"] < 1e-4 for release in verified), verified

    os.kill(reef.scheduler(), signal.SIGKILL)
    deadline = time.monotonic() + START_SECONDS
    while True:
        response = reef.http.post("/v1/chat/completions", json={"model": "any", "messages": PROMPT, "max_tokens": 1})
        if response.status_code == 200 and not reef.http.get("/healthz").is_error:
            break
        assert time.monotonic() < deadline, "the engine was not replaced"
        time.sleep(0.5)
    assert reef.ask(temperature=0.0)[1] == answer
    assert reef.head()["number"] == 3
    assert first_answer
