"""Two engines under one service, of which one freezes: who waits, for how long, and what everybody is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.conftest import needs

needs("torch", "transformers")

from crash.deployment import Deployment  # noqa: E402
from crash.model import make_model  # noqa: E402

REQUESTS = 8


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    flags = {
        "inference.model-path": make_model(tmp_path / "model"),
        "inference.engines": 2,
        "inference.health-timeout": 8,
        "inference.threads": 1,
        "inference.kv-cache-tokens": 4096,
        "reef.default-scenario": "alpha",
    }
    made = Deployment(tmp_path / "run", flags)
    made.start()
    try:
        made.wait_until_healthy(200)
        yield made
    finally:
        made.end()


def test_a_frozen_engine_is_replaced_and_its_requests_get_503(deployment):
    url = f"http://127.0.0.1:{deployment.port}/v1/chat/completions"

    def ask(number: int) -> httpx.Response:
        messages = [{"role": "user", "content": f"{number}: where is everybody?"}]
        return httpx.post(url, json={"model": "any", "messages": messages, "max_tokens": 8}, timeout=100)

    frozen = deployment.worker("engine")
    assert frozen is not None
    os.kill(frozen, signal.SIGSTOP)
    with ThreadPoolExecutor(REQUESTS) as clients:
        answers = list(clients.map(ask, range(REQUESTS)))
    lost = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(lost) < REQUESTS, "those on the frozen engine, and no others"
    for answer in lost:
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1, answer.text
        assert "was lost" in answer.json()["error"]["message"]
    deployment.wait_until_healthy(200)
    assert deployment.worker("engine") not in (None, frozen) and not os.path.exists(f"/proc/{frozen}")
    assert {ask(number).status_code for number in range(2)} == {200}
    records = list(deployment.client.records("alpha", kind="inference"))
    assert len(records) == REQUESTS - len(lost) + 2, "nothing was asked a second time"
    assert "engine-0: no sign of life for " in deployment.log.read_text()
    deadline = time.monotonic() + 60
    while len(engines := deployment.client.get("/reef/status")["engines"]) < 2:
        assert time.monotonic() < deadline
    assert not any(engine["paused"] for engine in engines)
