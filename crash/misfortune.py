"""What happens to a data directory besides crashes: a second service, a clock that jumps, a damaged marker."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from crash.clock import Clock
from crash.deployment import Deployment, Unrecovered
from crash.run import FLAGS, SCENARIOS

SECONDS = 180.0
DAY = 86400.0
BODY = {"model": "any", "messages": [{"role": "user", "content": "And now?"}], "max_tokens": 4}
RELEASES = f"/reef/scenarios/{SCENARIOS[0]}/releases"
COMMITS = f"/reef/scenarios/{SCENARIOS[0]}/commits"


class Shifting:
    """A deployment that learns when it is taught, and its clock."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.clock = Clock(directory / "clock")
        flags = {
            **FLAGS,
            "inference.model-path": model,
            "evaluation.plugin": "always",
            "inference.health-timeout": 60,  # a busy machine may give an engine nothing for 10 s
            "recipe.min-age": 2.0,
        }
        self.deployment = Deployment(directory / "run", flags, paths=[self.clock.directory])
        self.receipts: list[str] = []

    @contextmanager
    def running(self) -> Iterator[Shifting]:
        self.deployment.start()
        try:
            self.deployment.wait_until_healthy(SECONDS)
            yield self
        finally:
            self.deployment.end()

    def teach(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Two good answers and two bad ones, reported, then `meanwhile`; returns once a release came of them."""
        client = self.deployment.client
        before = self.head()
        asked = [client.post("/v1/chat/completions", BODY)["reef"]["agent_record_id"] for _ in range(4)]
        for index, receipt in enumerate(asked):
            client.post("/reef/report", {"score": float(index % 2), "references": [receipt]})
        self.receipts += asked
        meanwhile()
        deadline = time.monotonic() + SECONDS
        while self.head() == before:
            if time.monotonic() > deadline:
                raise Unrecovered(f"nothing is learned: {client.get('/reef/status')}")
            time.sleep(0.1)

    def head(self) -> int:
        number: int = self.deployment.client.get(f"/reef/scenarios/{SCENARIOS[0]}")["head"]["number"]
        return number

    def crash(self) -> None:
        self.deployment.kill()
        self.deployment.wait_for_no_process()

    def restart(self) -> None:
        self.deployment.start()
        self.deployment.wait_until_healthy(SECONDS)

    def refusal(self, deployment: Deployment) -> str:
        """What a service says that must not start, and ends by itself."""
        deployment.start()
        try:
            _require(deployment.wait_until_dead(SECONDS), "it runs")
            _require("Traceback" not in deployment.tail(), f"it fell over: {deployment.tail()}")
        finally:
            deployment.end()
        return deployment.tail()


def second_service(shifting: Shifting) -> None:
    """One that is started on the data of the first refuses and names it; the first does not notice."""
    first = shifting.deployment
    flags = {**first.flags, "reef.port": 0, "reef.data-dir": first.data}
    said = shifting.refusal(Deployment(first.directory.parent / "second", flags))
    _require(f"in use by process {first.pid}" in said, f"it does not name the first: {said}")
    shifting.teach()


def damaged_marker(shifting: Shifting) -> None:
    """After a crash, a marker that cannot be read stops the start and says what to do; what it says works."""
    shifting.crash()
    marker = shifting.deployment.data / "marker.json"
    marker.write_bytes(marker.read_bytes()[:-20])
    said = shifting.refusal(shifting.deployment)
    for words in ("marker.json is damaged", "move the file away"):
        _require(words in said, f"it does not say {words!r}: {said}")
    marker.rename(marker.with_suffix(".damaged"))
    head = shifting.receipts and len(shifting.receipts) // 4
    shifting.restart()
    _require(shifting.head() == head, f"it serves release {shifting.head()} instead of {head}")
    shifting.teach()


def clock_back(shifting: Shifting) -> None:
    """The clock jumps back while it runs and while it is down: nothing waits for it, is reordered or grows stale."""
    client = shifting.deployment.client
    shifting.teach()
    begun = shifting.head()
    shifting.teach(lambda: shifting.clock.shift(-DAY))  # while reports wait until they are old enough
    shifting.crash()
    shifting.clock.shift(-2 * DAY)
    shifting.restart()
    _require(shifting.head() == begun + 1, "another head after the restart")
    shifting.teach()
    releases = client.get(RELEASES)["releases"]
    numbers = [release["number"] for release in releases]
    _require(numbers == list(range(begun + 2, -1, -1)), f"releases are out of order: {numbers}")
    times = [release["created_at"] for release in releases]
    _require(times[0] < times[1] - DAY / 2 < times[2] - DAY, "the clock has not jumped in the service")
    stored = [record["agent_record_id"] for record in client.records(SCENARIOS[0], kind="inference")]
    _require(stored == shifting.receipts, "records are not in the order in which they came")
    consumed = [item for commit in client.get(COMMITS)["commits"] for item in commit["consumed"]]
    counted = Counter(item["record_id"] for item in consumed)
    _require(len(counted) == 2 * len(stored) and max(counted.values()) == 1, "a record was lost or trained twice")
    _require({item["disposition"] for item in consumed} == {"trained"}, "the clock made a record stale")


MISFORTUNES: tuple[Callable[[Shifting], None], ...] = (second_service, clock_back, damaged_marker)


def problems(model: Path, directory: Path) -> dict[str, list[str]]:
    """All of them, one after the other, in one deployment; what broke, by name."""
    found: dict[str, list[str]] = {}
    with Shifting(model, directory).running() as shifting:
        for misfortune in MISFORTUNES:
            found[misfortune.__name__] = []
            try:
                misfortune(shifting)
            except Exception as error:
                found[misfortune.__name__].append(f"{error}\n{shifting.deployment.tail()}")
    return found


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Unrecovered(otherwise)
