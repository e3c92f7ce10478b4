"""Durable appends in one interleaved run on one file system: SQLite, PostgreSQL, and one transaction for each append.

    python -m benchmarks.records [--seconds 1.0] [--rounds 3] [--directory DIR] [--json FILE]

The rival is SQLite with the same table, codec, pragmas and writer thread, but commits every append by itself.
PostgreSQL is a server that this program starts, with its defaults (fsync on), over a Unix socket; without one on the
machine its column is left out. Each round measures all at every concurrency, one right after the other; the table
shows medians over rounds. Other load on the machine moves absolute numbers; compare the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reef.records import schema
from reef.records.codec import encode
from reef.records.opening import storage_at
from reef.records.sqlite import Append, SqliteStorage
from reef.runtime.interfaces import InferenceRecord, Record
from tests.records.values import base, typical

CONCURRENCIES = (1, 16, 64)
Appends = dict[int, dict[str, dict[str, float]]]  # by concurrency and contender
OPEN_RECORDS = 100_000


class OneTransactionPerAppend:
    """The rival: a queue of appends before one thread, each committed alone."""

    def __init__(self, path: Path) -> None:
        schema.create_or_verify(path, 10.0)
        self._connection = schema.connect_writer(path, 10.0)
        self._thread = ThreadPoolExecutor(1)

    async def append(self, record: Record) -> Record:
        encoded = encode(record)
        sequence, _ = await asyncio.get_running_loop().run_in_executor(self._thread, self._commit, encoded)
        encoded.record.sequence = sequence
        return encoded.record

    def _commit(self, encoded) -> tuple[int, float]:
        self._connection.execute("BEGIN IMMEDIATE")
        stored = Append(encoded)(self._connection)
        self._connection.execute("COMMIT")
        return stored

    async def close(self) -> None:
        self._thread.shutdown()
        self._connection.close()


async def measure(
    append: Callable[[Record], Awaitable[Record]], records: list[InferenceRecord], concurrency: int, seconds: float
) -> dict[str, float]:
    """Appends per second and latency in milliseconds; each of `concurrency` tasks has one append in flight."""
    numbers, latencies = itertools.count(), []
    prefix = f"{concurrency}-{time.monotonic_ns()}"
    start = time.perf_counter()

    async def client() -> None:
        while (began := time.perf_counter()) < start + seconds:
            number = next(numbers)
            record = records[number % len(records)]
            record.record_id = f"chatcmpl-{prefix}-{number}"
            await append(record)
            latencies.append(time.perf_counter() - began)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    elapsed = time.perf_counter() - start
    return {
        "appends_per_second": len(latencies) / elapsed,
        "p50_ms": statistics.median(latencies) * 1e3,
        "p95_ms": sorted(latencies)[int(len(latencies) * 0.95)] * 1e3,
    }


async def compare(
    directory: Path, rounds: int, seconds: float, postgres: str | None
) -> dict[int, dict[str, dict[str, float]]]:
    rng = random.Random(0)
    records = [typical("", rng) for _ in range(512)]
    group = SqliteStorage(directory / "group.db")
    await group.open()
    rival = OneTransactionPerAppend(directory / "rival.db")
    contenders: dict[str, Any] = {"group": group, "rival": rival}
    if postgres is not None:
        contenders["postgres"] = storage_at(postgres)
        await contenders["postgres"].open()
    samples: dict[int, dict[str, list[dict[str, float]]]] = {
        n: {name: [] for name in contenders} for n in CONCURRENCIES
    }
    for contender in contenders.values():
        await measure(contender.append, records, 64, 0.2)  # warm up
    for _ in range(rounds):
        for concurrency in CONCURRENCIES:
            for name, contender in contenders.items():
                samples[concurrency][name].append(await measure(contender.append, records, concurrency, seconds))
    for contender in contenders.values():
        await contender.close()
    return {
        concurrency: {
            name: {key: statistics.median(sample[key] for sample in runs) for key in runs[0]}
            for name, runs in by_name.items()
        }
        for concurrency, by_name in samples.items()
    }


async def measure_size_and_open(directory: Path) -> dict[str, float]:
    """Fill a database with distinct exchanges, then open it and ask what a start asks."""
    path = directory / "open.db"
    rng = random.Random(1)
    storage = SqliteStorage(path)
    await storage.open()
    await storage.create_scenario(base("demo"))
    body_bytes = 0
    for first in range(0, OPEN_RECORDS, 2000):
        records = [typical(f"chatcmpl-{rng.getrandbits(96):024x}", rng) for _ in range(first, first + 2000)]
        body_bytes += sum(len(record.request) + len(record.response) for record in records)
        await asyncio.gather(*map(storage.append, records))
    await storage.close()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        await storage.open()
        await storage.scenarios()
        await storage.counts("demo")
        await storage.pending_reports("demo", 0, 1000)
        times.append(time.perf_counter() - began)
        await storage.close()
    return {
        "body_bytes_per_record": body_bytes / OPEN_RECORDS,
        "file_bytes_per_record": path.stat().st_size / OPEN_RECORDS,
        "open_seconds_at_100k": statistics.median(times),
    }


def fsync_milliseconds(directory: Path) -> float:
    """Median time to append one page to a file and sync it: what no durable append can beat alone."""
    descriptor = os.open(directory / "probe", os.O_CREAT | os.O_WRONLY)
    times = []
    for _ in range(100):
        began = time.perf_counter()
        os.write(descriptor, bytes(4096))
        os.fsync(descriptor)
        times.append(time.perf_counter() - began)
    os.close(descriptor)
    return statistics.median(times) * 1e3


def show(results: dict) -> None:
    print(f"fsync of one page: {results['fsync_ms']:.2f} ms (median); SQLite {results['sqlite']}, {results['machine']}")
    titles = {"group": "SQLite", "rival": "SQLite, one transaction each", "postgres": "PostgreSQL"}
    names = list(next(iter(results["appends"].values())))
    heads = [f"{titles[name]}, appends/s (p50, p95 ms)" for name in names]
    print(
        f"| concurrency | {' | '.join(heads)} | " + " | ".join(f"SQLite to {titles[name]}" for name in names[1:]) + " |"
    )
    print("|" + " ---: |" * (2 * len(names)))
    for concurrency, contenders in results["appends"].items():
        cells = [
            f"{found['appends_per_second']:,.0f} ({found['p50_ms']:.1f}, {found['p95_ms']:.1f})"
            for found in contenders.values()
        ]
        first = contenders["group"]["appends_per_second"]
        cells += [f"{first / contenders[name]['appends_per_second']:.1f}" for name in names[1:]]
        print(f"| {concurrency} | {' | '.join(cells)} |")
    print(
        f"an exchange with {results['body_bytes_per_record']:.0f} bytes of bodies, 40 prompt and 30 output tokens "
        f"takes {results['file_bytes_per_record']:.0f} bytes of file; "
        f"opening {OPEN_RECORDS:,} records takes {results['open_seconds_at_100k'] * 1e3:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="on the file system to measure")
    parser.add_argument("--json", type=Path, default=None, help="write the results here, too")
    arguments = parser.parse_args()
    with ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory)))
        postgres = None
        if find_spec("psycopg") is not None and find_spec("alembic") is not None:
            from tests.postgres_server import binaries, running_server

            if binaries() is not None:
                postgres = opened.enter_context(running_server(fsync=True, directory=arguments.directory)).url
        results = {
            "fsync_ms": fsync_milliseconds(directory),
            "sqlite": sqlite3.sqlite_version,
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
            "appends": asyncio.run(compare(directory, arguments.rounds, arguments.seconds, postgres)),
            **asyncio.run(measure_size_and_open(directory)),
        }
    show(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
