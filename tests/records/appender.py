"""A process that writes until it is killed: `python -m tests.records.appender URL PREFIX`.

Each line it prints names what was acknowledged: "append ID", or "commit ID". Everything goes to scenario `s`.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from reef.records.opening import storage_at
from reef.runtime.interfaces import Storage
from tests.records.values import base, exchange, report, training

CONCURRENCY = 16


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def append_forever(storage: Storage, prefix: str, rng: random.Random) -> None:
    number = 0
    while True:
        name = f"{prefix}-{number}"
        number += 1
        await storage.append(exchange(name, prompt=name + "x" * rng.randrange(3000)))
        say(f"append {name}")
        await storage.append(report(f"report-{name}", [name]))
        say(f"append report-{name}")


async def commit_forever(storage: Storage, prefix: str) -> None:
    state = await storage.create_scenario(base())
    head, number = state.head, 0
    while True:
        reports = await storage.pending_reports("s", 0, 8)
        consumed = [name for found in reports for name in (found.record_id, *found.references)]
        commit = await storage.commit(training(f"{prefix}-{number}", head, consumed))
        say(f"commit {commit.commit_id}")
        assert commit.release is not None
        head, number = commit.release, number + 1


async def main(url: str, prefix: str) -> None:
    storage = storage_at(url)
    await storage.open()
    rng = random.Random(prefix)
    appends = (append_forever(storage, f"{prefix}-{worker}", rng) for worker in range(CONCURRENCY))
    await asyncio.gather(commit_forever(storage, prefix), *appends)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
