"""The data directory's file system is full, for a while or for moments: nothing that was acknowledged is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft")

from crash.audit import Audit  # noqa: E402
from crash.disk import Flicker, SmallDisk, can_mount  # noqa: E402
from crash.load import Load  # noqa: E402
from crash.model import make_model  # noqa: E402
from crash.rescore import Rescorer  # noqa: E402
from crash.run import FLAGS, SCENARIOS  # noqa: E402
from reef.errors import Unavailable  # noqa: E402

BODY = {"model": "any", "messages": [{"role": "user", "content": "Full?"}], "max_tokens": 4}
SECONDS = 180.0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("disk") / "model")


@pytest.fixture(scope="module")
def deployment(model: Path, tmp_path_factory) -> Iterator[SmallDisk]:
    directory = tmp_path_factory.mktemp("disk")
    if not can_mount(directory):
        pytest.skip("needs a tmpfs in a user namespace")
    made = SmallDisk(directory / "run", {**FLAGS, "inference.model-path": model, "inference.health-timeout": 60})
    made.start()
    try:
        made.wait_until_healthy(SECONDS)
        for name in SCENARIOS:
            made.client.post("/reef/scenarios", {"name": name})
        yield made
    finally:
        made.end()


def until(condition, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def head(deployment: SmallDisk, scenario: str) -> int:
    return deployment.client.get(f"/reef/scenarios/{scenario}")["head"]["number"]


def refusal(deployment: SmallDisk, path: str, body: dict) -> str:
    """The message of the 503 that this call must get, at the latest when space that the database holds is used up."""
    for _ in range(2000):
        try:
            deployment.client.post(path, body)
        except Unavailable as error:
            return str(error)
    raise AssertionError(f"{path} still stores")


def test_a_full_disk_is_said_clearly_and_forgotten_when_there_is_space(deployment):
    client = deployment.client
    receipt = client.post("/v1/chat/completions", BODY)["reef"]["agent_record_id"]
    deployment.fill(leave=1 << 18)  # the database still writes
    until(lambda: "bytes are free" in (deployment.healthy() or ""), "healthz does not say why")
    with pytest.raises(Unavailable, match="no space left"):
        client.get("/healthz")
    deployment.fill()
    until(lambda: "nothing was stored" in (deployment.healthy() or ""), "healthz does not say that it cannot store")
    assert "no space left" in refusal(deployment, "/v1/chat/completions", BODY)
    assert "no space left" in refusal(deployment, "/reef/report", {"score": 1.0, "references": [receipt]})
    assert "no space left" in refusal(deployment, "/reef/train", {"please": "learn"})
    assert "no space left" in refusal(deployment, "/reef/scenarios", {"name": "another"})
    # What needs no space goes on.
    assert "no space left" in client.get("/reef/status")["health"][0]
    assert client.get("/v1/models")["data"]
    assert client.get("/reef/scenarios/alpha/records")["records"][0]["agent_record_id"] == receipt
    deployment.free()
    until(lambda: deployment.healthy() is None, "healthz does not see that there is space again")
    assert client.post("/reef/report", {"score": 1.0, "references": [receipt]})["references"] == [receipt]
    assert deployment.running and deployment.runs == 1


def test_a_disk_that_fills_at_any_moment_loses_and_doubles_nothing(deployment, model):
    load, flicker = Load(deployment.port, SCENARIOS, seed=1), Flicker(deployment, seed=1)
    audit = Audit(deployment.client, load.ledger, Rescorer(model, lambda: deployment.seen), seed=1)
    load.start()
    try:
        until(lambda: all(head(deployment, name) for name in SCENARIOS), "nothing is learned")
        flicker.start()
        until(lambda: flicker.times > 4 and load.ledger.refused > 0, "the disk was never full")
        flicker.stop()
        until(lambda: deployment.healthy() is None, "not healthy again")
        before = {name: head(deployment, name) for name in SCENARIOS}
        until(lambda: all(head(deployment, name) > before[name] for name in SCENARIOS), "learning stopped for good")
    finally:
        load.stop()
    audit.check(SCENARIOS)
    audit.check_all_receipts(SCENARIOS)
    assert "\n".join(audit.findings.everything()) == ""
    assert deployment.running and deployment.runs == 1
