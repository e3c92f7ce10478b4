"""Does the gateway's memory stay flat? Many requests through `reef serve`, and its resident memory at intervals.

    python -m benchmarks.soak [--seconds 180] [--clients 16] [--samples 12] [--json FILE]

Every request is a conversation of its own with an id and a report, half of them streamed, over as many scenarios as
there are clients; a provider that this program plays answers. Growth is what the last half of the run added, by a
straight line through its samples; the first half fills SQLite's caches (16 MiB, and 2 MiB for each reader), for which
each exchange is some kilobytes long. Exit code 1 if that is more than --limit MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.gateway import resident
from benchmarks.load import Gateway, provider


class Soak:
    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None))
        self.requests = 0
        self._stop = False

    async def run(self, clients: int, seconds: float, samples: int, pid: int) -> list[tuple[int, float]]:
        """(requests so far, MiB) at equal intervals."""
        found: list[tuple[int, float]] = []
        async with self._http, asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._client(number))
            for sample in range(samples):
                await asyncio.sleep(seconds / samples)
                found.append((self.requests, resident(pid)))
                at = (sample + 1) * seconds / samples
                print(f"  {at:>6.0f} s {found[-1][0]:>10,} requests {found[-1][1]:>8.1f} MiB", flush=True)
            self._stop = True
        return found

    async def _client(self, number: int) -> None:
        for turn in itertools.count():
            if self._stop:
                return
            body = {
                "model": "any",
                "messages": [{"role": "user", "content": f"{number} {turn} {random.randbytes(3000).hex()}"}],
                "stream": turn % 2 == 1,
            }
            receipt, scenario = f"soak-{number}-{turn}", {"x-reef-scenario": f"soak-{number}"}
            headers = {**scenario, "x-reef-record-id": receipt}
            (await self._http.post("/v1/chat/completions", json=body, headers=headers)).raise_for_status()
            verdict = {"references": [receipt], "score": 1.0}
            (await self._http.post("/reef/report", json=verdict, headers=scenario)).raise_for_status()
            self.requests += 2


def growth(samples: list[tuple[int, float]]) -> tuple[int, float]:
    """Requests of the last half of the samples, and the MiB that they added."""
    requests, memory = zip(*samples[len(samples) // 2 :], strict=True)
    number = requests[-1] - requests[0]
    return number, number * statistics.linear_regression(requests, memory).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--limit", type=float, default=10.0, help="MiB that the last half may add")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, provider() as upstream:
        gateway = Gateway(0, Path(name), {"inference.upstream-url": upstream})
        gateway.start()
        try:
            began = time.monotonic()
            pid = gateway.process.pid
            samples = asyncio.run(Soak(gateway.server.url).run(options.clients, options.seconds, options.samples, pid))
            rate = samples[-1][0] / (time.monotonic() - began)
        finally:
            gateway.stop()
    number, grown = growth(samples)
    print(f"{samples[-1][0]:,} requests, {rate:.0f} a second; the last {number:,} added {grown:.1f} MiB")
    if options.json is not None:
        options.json.write_text(json.dumps({"samples": samples, "requests": number, "mib": grown}, indent=2))
    sys.exit(1 if grown > options.limit else 0)


if __name__ == "__main__":
    main()
