"""The pause that clients see when a LoRA release is published under them.

    python -m benchmarks.publication [--model DIR] [--requests 16] [--publications 8]

`reef serve` runs as a user would run it, with 16 streams in flight. Two steps are trained; then their releases are
published in turn (by promotion, which takes the same way as a trained candidate). Of each publication:

- the pause, from the barrier's start to its end, and where it goes (seconds by phase, as the coordinator measures
  them). The step in progress when the barrier began still gives every stream its token, so that what the clients wait
  for beyond their usual wait is the rest: `stopped`;
- the longest wait between two chunks of one stream, from the request for the publication to its end, staging and
  probe included. The rival is the longest wait in as long a time before the publication, in the same run.

`in_place` keeps the keys and values of the requests in flight, `retract` computes them again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from reef.demo.model import smollm2_directory
from reef.demo.server import Server

STEP = "step in progress"


class Traffic:
    """Streams that never stop, and when each of their chunks came."""

    def __init__(self, url: str, requests: int) -> None:
        self._url = url
        self._stop = threading.Event()
        self.arrivals: list[list[float]] = [[] for _ in range(requests)]
        self._threads = [threading.Thread(target=self._read, args=(index,), daemon=True) for index in range(requests)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _read(self, index: int) -> None:
        body = {"model": "any", "messages": [{"role": "user", "content": f"Story {index}, please."}], "stream": True}
        body |= {"max_tokens": 1500, "ignore_eos": True, "seed": index}
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._stop.is_set():
                with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    for line in response.iter_lines():
                        if line:
                            self.arrivals[index].append(time.perf_counter())
                        if self._stop.is_set():
                            break

    def waits(self, start: float, end: float) -> list[float]:
        """Seconds between two chunks of one stream, of those that touch [start, end]."""
        return [
            after - before
            for arrivals in self.arrivals
            for before, after in itertools.pairwise(list(arrivals))
            if after >= start and before <= end and after - before > 0.001
        ]


@dataclass
class Measured:
    """One value per publication, in seconds."""

    phases: list[dict[str, float]] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)  # around the publication
    before: list[float] = field(default_factory=list)  # the longest wait in as long a time before it
    usual: list[float] = field(default_factory=list)  # the median wait in that time
    whole: list[float] = field(default_factory=list)  # from asking for the publication to its end

    @property
    def pauses(self) -> list[float]:
        return [sum(phases.values()) for phases in self.phases]

    @property
    def stopped(self) -> list[float]:
        return [sum(phases.values()) - phases[STEP] for phases in self.phases]


def measure(model: Path, mode: str, requests: int, publications: int) -> Measured:
    with tempfile.TemporaryDirectory() as directory:
        flags = {
            "inference.model-path": model,
            "inference.pause-mode": mode,
            "training.backend": "torch",
            "recipe.batch-size": 2,
            "reef.data-dir": Path(directory) / "data",
            "reef.port": 0,
        }
        server = Server([f"--{key}={value}" for key, value in flags.items()], Path(directory) / "log")
        server.start()
        try:
            for _ in server.starting(180):
                pass
            with httpx.Client(base_url=server.url, timeout=120) as client:
                releases = [teach(client, number) for number in (1, 2)]
                with Traffic(server.url, requests) as traffic:
                    time.sleep(5)
                    return publish_in_turn(client, traffic, releases, publications)
        finally:
            server.stop()


def teach(client: httpx.Client, number: int) -> str:
    """Two answers, two scores, one step; return the release."""
    body = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    for seed in range(2):
        answer = client.post("/v1/chat/completions", json={**body, "seed": 10 * number + seed})
        receipt = answer.headers["x-reef-agent-record-id"]
        client.post("/reef/report", json={"score": float(seed), "references": [receipt]}).raise_for_status()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        head = client.get("/reef/status").json()["scenarios"][0]["head"]
        if head["number"] >= number:
            return str(head["release_id"])
        time.sleep(0.2)
    raise SystemExit("no release within 120 s")


def publish_in_turn(client: httpx.Client, traffic: Traffic, releases: list[str], publications: int) -> Measured:
    measured = Measured()
    for index in range(publications):
        start = time.perf_counter()
        release = releases[index % len(releases)]
        client.post("/reef/scenarios/default/promote", json={"release_id": release}).raise_for_status()
        end = time.perf_counter()
        time.sleep(2)  # what was stopped goes on, and is measured
        measured.phases.append(client.get("/reef/status").json()["last_pause_phases"])
        measured.whole.append(end - start)
        measured.longest.append(max(traffic.waits(start, end)))
        time.sleep(end - start + 1)  # nothing but traffic, for as long
        quiet = traffic.waits(time.perf_counter() - (end - start), time.perf_counter())
        measured.before.append(max(quiet))
        measured.usual.append(statistics.median(quiet))
    return measured


def shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1e3:.1f} ms ({min(values) * 1e3:.1f} to {max(values) * 1e3:.1f})"


def report(mode: str, measured: Measured) -> None:
    print(f"  {mode}: stopped {shown(measured.stopped)}, pause {shown(measured.pauses)}; each took", end=" ")
    print(f"{statistics.median(measured.whole):.1f} s from the request on")
    print(
        f"    longest wait of a stream: {shown(measured.longest)} around a publication, {shown(measured.before)}",
        end="",
    )
    print(f" without one, where the usual wait is {shown(measured.usual)}")
    for phase in measured.phases[0]:
        print(f"    {phase:<17} {shown([phases[phase] for phases in measured.phases])}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--publications", type=int, default=8)
    parser.add_argument("--modes", nargs="+", default=["in_place", "retract"])
    arguments = parser.parse_args()
    model = arguments.model or smollm2_directory()
    print(f"{model.name}, {arguments.requests} streams in flight, {arguments.publications} LoRA publications each")
    print(f"load average {os.getloadavg()[0]:.1f} at the start")
    for mode in arguments.modes:
        report(mode, measure(model, mode, arguments.requests, arguments.publications))


if __name__ == "__main__":
    main()
