"""The pause that clients see when a LoRA release is published under them, on the real model.

    python -m benchmarks.publication [--model DIR] [--requests 16] [--publications 6]

`reef serve` runs as a user would run it, with 16 streams in flight. One step is trained; then its release and the base
are published in turn (by promotion and rollback, which take the same way as a trained candidate). Two numbers each:
the pause, from the barrier's start to its end as the coordinator measures it, and the longest wait between two chunks
of one stream around the publication. The rival is the same deployment with the other pause mode: `in_place` keeps the
keys and values of the requests, `retract` computes them again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from pathlib import Path

import httpx

from reef.demo.model import smollm2_directory
from reef.demo.server import Server


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
        body |= {"max_tokens": 400, "ignore_eos": True, "seed": index}
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._stop.is_set():
                with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    for _ in response.iter_lines():
                        self.arrivals[index].append(time.perf_counter())
                        if self._stop.is_set():
                            break

    def longest_wait(self, start: float, end: float) -> float:
        """Seconds between two chunks of one stream, the worst of those that touch [start, end]."""
        worst = 0.0
        for arrivals in self.arrivals:
            for before, after in itertools.pairwise(arrivals):
                if after >= start and before <= end:
                    worst = max(worst, after - before)
        return worst


def measure(model: Path, mode: str, requests: int, publications: int) -> tuple[list[float], list[float], float]:
    """Pauses and longest waits (seconds) of the publications, and the median wait between chunks meanwhile."""
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
                release = teach(client)
                with Traffic(server.url, requests) as traffic:
                    time.sleep(5)
                    return publish_in_turn(client, traffic, release, publications)
        finally:
            server.stop()


def teach(client: httpx.Client) -> str:
    """Two answers, two scores, one step; return the release."""
    body = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    for seed in range(2):
        receipt = client.post("/v1/chat/completions", json={**body, "seed": seed}).headers["x-reef-agent-record-id"]
        client.post("/reef/report", json={"score": float(seed), "references": [receipt]}).raise_for_status()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        head = client.get("/reef/status").json()["scenarios"][0]["head"]
        if head["number"]:
            return str(head["release_id"])
        time.sleep(0.2)
    raise SystemExit("no release within 120 s")


def publish_in_turn(
    client: httpx.Client, traffic: Traffic, release: str, publications: int
) -> tuple[list[float], list[float], float]:
    pauses, waits = [], []
    began = time.perf_counter()
    for index in range(publications):
        start = time.perf_counter()
        if index % 2 == 0:
            answer = client.post("/reef/scenarios/default/rollback")
        else:
            answer = client.post("/reef/scenarios/default/promote", json={"release_id": release})
        answer.raise_for_status()
        end = time.perf_counter()
        time.sleep(2)
        pauses.append(client.get("/reef/status").json()["last_pause_seconds"])
        waits.append(traffic.longest_wait(start, end))
    gaps = [b - a for times in traffic.arrivals for a, b in itertools.pairwise(times) if a > began]
    return pauses, waits, statistics.median(gap for gap in gaps if gap > 0.001)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--publications", type=int, default=6)
    arguments = parser.parse_args()
    model = arguments.model or smollm2_directory()
    print(f"{model.name}, {arguments.requests} streams in flight, {arguments.publications} LoRA publications each")
    for mode in ("in_place", "retract"):
        pauses, waits, usual = measure(model, mode, arguments.requests, arguments.publications)
        shown = "  ".join(
            f"{name} {statistics.median(values) * 1e3:.1f} ms ({min(values) * 1e3:.1f} to {max(values) * 1e3:.1f})"
            for name, values in (("pause", pauses), ("longest wait", waits))
        )
        print(f"  {mode:<9} {shown}  usual wait {usual * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
