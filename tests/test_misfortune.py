"""What happens to a data directory besides crashes: a second service, a clock that jumps back, a damaged marker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft")

from crash.deployment import Deployment, Unrecovered  # noqa: E402
from crash.model import make_model  # noqa: E402
from crash.run import FLAGS  # noqa: E402

BODY = {"model": "any", "messages": [{"role": "user", "content": "And now?"}], "max_tokens": 4}
DAY = 86400.0
SECONDS = 60.0

SHIFTED_CLOCK = """
import os, time
_real, _file = time.time, os.path.join(os.path.dirname(__file__), "offset")
def _shifted():
    with open(_file) as file:
        return _real() + float(file.read())
time.time, time.time_ns = _shifted, lambda: int(_shifted() * 1e9)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("misfortune") / "model")


@pytest.fixture
def deployment(model: Path, tmp_path: Path) -> Iterator[Deployment]:
    clock = tmp_path / "clock"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    (clock / "offset").write_text("0")
    flags = {**FLAGS, "inference.model-path": model, "evaluation.plugin": "always", "recipe.min-age": 0.5}
    made = Deployment(tmp_path / "run", flags, paths=[clock])
    made.start()
    try:
        made.wait_until_healthy(SECONDS)
        yield made
    finally:
        made.end()


def shift(deployment: Deployment, seconds: float) -> None:
    clock = deployment.directory.parent / "clock"
    (clock / "next").write_text(str(seconds))
    (clock / "next").rename(clock / "offset")


def teach(deployment: Deployment) -> list[str]:
    """Two answers and two bad ones, reported; returns the receipts once a release came of them."""
    client = deployment.client
    before = client.get("/reef/scenarios/alpha")["head"]["number"]
    receipts = [client.post("/v1/chat/completions", BODY)["reef"]["agent_record_id"] for _ in range(4)]
    for index, receipt in enumerate(receipts):
        client.post("/reef/report", {"score": float(index % 2), "references": [receipt]})
    deadline = time.monotonic() + SECONDS
    while client.get("/reef/scenarios/alpha")["head"]["number"] == before:
        assert time.monotonic() < deadline, client.get("/reef/status")
        time.sleep(0.1)
    return receipts


@pytest.mark.timeout(240)
def test_a_second_service_refuses_and_names_the_first(deployment):
    flags = {**deployment.flags, "reef.port": 0}
    second = Deployment(deployment.directory.parent / "second", {**flags, "reef.data-dir": deployment.data})
    second.start()
    try:
        assert second.wait_until_dead(SECONDS), "it runs on somebody else's data"
    finally:
        second.end()
    assert f"in use by process {deployment.pid}" in second.tail() and "Traceback" not in second.tail()
    teach(deployment)


@pytest.mark.timeout(300)
def test_a_clock_that_jumps_back_changes_neither_order_nor_recovery(deployment):
    client = deployment.client
    receipts = teach(deployment)
    shift(deployment, -DAY)
    receipts += teach(deployment)
    deployment.kill()
    deployment.wait_for_no_process()
    shift(deployment, -2 * DAY)
    deployment.start()
    deployment.wait_until_healthy(SECONDS)
    assert client.get("/reef/scenarios/alpha")["head"]["number"] == 2
    receipts += teach(deployment)
    releases = client.get("/reef/scenarios/alpha/releases")["releases"]
    assert [release["number"] for release in releases] == [3, 2, 1, 0]
    times = [release["created_at"] for release in releases]
    assert times[0] < times[1] - DAY / 2 < times[2] - DAY, "the clock has not jumped in the service"
    stored = [r["agent_record_id"] for r in client.records("alpha", kind="inference")]
    assert stored == receipts, "in the order in which they came"
    commits = client.get("/reef/scenarios/alpha/commits")["commits"]
    consumed = [item["record_id"] for commit in commits for item in commit["consumed"]]
    assert len(consumed) == len(set(consumed)) == 2 * len(receipts)


@pytest.mark.timeout(240)
def test_a_damaged_marker_stops_the_start_and_says_what_to_do(deployment):
    teach(deployment)
    deployment.kill()
    deployment.wait_for_no_process()
    marker = deployment.data / "marker.json"
    marker.write_bytes(marker.read_bytes()[:-20])
    deployment.start()
    with pytest.raises(Unrecovered, match="ended"):
        deployment.wait_until_healthy(SECONDS)
    deployment.wait_for_no_process()
    assert "marker.json is damaged" in deployment.tail() and "move the file away" in deployment.tail()
    assert "Traceback" not in deployment.tail()
    marker.unlink()
    deployment.start()
    deployment.wait_until_healthy(SECONDS)
    assert deployment.client.get("/reef/scenarios/alpha")["head"]["number"] == 1
    teach(deployment)
