"""Two `reef serve` on one PostgreSQL database: one trains, both serve and record; who dies is followed by the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft", "openai", "psycopg", "alembic")

from reef.errors import WorkerDied  # noqa: E402
from tests.test_end_to_end import Reef, worst_difference  # noqa: E402

LEASE_SECONDS = 8.0


@pytest.fixture
def gateway(tiny_model: Path, tmp_path: Path, postgres: Any, schema: str) -> Iterator[Callable[..., Reef]]:
    """Makes gateways by name; all share the weights of `a`."""
    made: list[Reef] = []

    def make(name: str, **flags: object) -> Reef:
        found = Reef(
            tiny_model,
            tmp_path / name,
            **{
                "storage.backend": "postgres",
                "storage.url": postgres.url,
                "storage.schema": schema,
                "storage.artifacts": tmp_path / "a/data/artifacts",
                "storage.lease-seconds": LEASE_SECONDS,
                "inference.kv-cache-tokens": 1024,
                **flags,
            },
        )
        made.append(found)
        return found

    yield make
    for reef in made:
        if hasattr(reef, "server"):
            reef.server.stop()


def until(what: str, condition: Callable[[], bool], seconds: float = 200.0) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, what
        time.sleep(0.1)


def teach(asked: Reef, told: Reef, seed: int) -> list[str]:
    receipts = [asked.ask(seed=seed + number)[0] for number in range(4)]
    for number, receipt in enumerate(receipts):
        told.report(receipt, float(number % 2))
    return receipts


def test_one_trains_the_other_follows_and_takes_over(gateway, tmp_path):
    a, b = gateway("a"), gateway("b")
    a.start(240)
    b.start(240)
    assert a.status()["trains"] == "this process" and "another process" in b.status()["trains"]

    receipts = teach(asked=b, told=b, seed=0)  # nothing of this goes through the one that trains
    until("a trains on what b recorded", lambda: a.head()["number"] == 1)
    until("b serves what a released", lambda: b.head() == a.head())
    receipts += [b.ask(seed=10)[0], a.ask(seed=11)[0]]
    assert b.ask(temperature=0.0)[1] == a.ask(temperature=0.0)[1]
    assert b.http.post("/reef/scenarios", json={"name": "late"}).is_success
    until("a knows what it is to train", lambda: "late" in a.http.get("/reef/scenarios").text)
    refused = b.http.post("/reef/scenarios/default/rollback")
    assert refused.status_code == 503 and "ask that one" in refused.text and str(a.directory) in refused.text

    stranger = gateway("c", **{"storage.artifacts": tmp_path / "elsewhere"})
    with pytest.raises(WorkerDied, match=r"(?s)storage\.artifacts: the head of scenario 'default' is content .* share"):
        stranger.start(240)

    a.kill()
    until("b takes over", lambda: b.status()["trains"] == "this process")
    receipts += teach(asked=b, told=b, seed=20)
    until("b trains", lambda: b.head()["number"] == 2)
    a.start(240)  # back as the other one
    assert "another process" in a.status()["trains"] and a.head() == b.head()
    receipts.append(a.ask(seed=30)[0])

    assert set(receipts) <= {record["agent_record_id"] for record in b.records()}
    commits = b.http.get("/reef/scenarios/default/commits").json()["commits"]
    consumed = [item["record_id"] for commit in commits for item in commit["consumed"]]
    assert len(consumed) == len(set(consumed)) == 16
    worst, loads = worst_difference(a)
    assert worst < 1e-4 and len(loads) == 3, "every answer is of the weights that it names, whichever process gave it"
    for one in (a, b):
        one.verify(PGPASSWORD="secret")  # which the directory does not keep
