"""SIGKILL at random moments: what was acknowledged is there, and nothing is half there."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from reef.records.opening import storage_at

ROUNDS = {"sqlite": 4, "postgres": 3}


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_sigkill_loses_nothing_acknowledged(tmp_path: Path, backend: str, schema: str, request, run):
    if backend == "sqlite":
        url = f"sqlite:{tmp_path / 'reef.db'}"
    else:
        url = f"{request.getfixturevalue('postgres').url}&schema={schema}"
    rng = random.Random(0)
    appended: set[str] = set()
    committed: set[str] = set()
    for attempt in range(ROUNDS[backend]):
        acknowledged = _write_and_die(url, f"round{attempt}", rng.randrange(20, 200))
        appended |= {name for what, name in acknowledged if what == "append"}
        committed |= {name for what, name in acknowledged if what == "commit"}
        run(_verify(url, appended, committed))
    assert len(appended) > 10 * ROUNDS[backend] and len(committed) > ROUNDS[backend]


def _write_and_die(url: str, prefix: str, enough: int) -> list[list[str]]:
    """Kill a writer once it has acknowledged so much, two commits included; return what it acknowledged."""
    command = [sys.executable, "-m", "tests.records.appender", url, prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        lines: list[list[str]] = []
        while len(lines) < enough or sum(what == "commit" for what, _ in lines) < 2:
            lines.append(process.stdout.readline().split())
        process.send_signal(signal.SIGKILL)
        lines += [line.split() for line in process.stdout]
    assert process.returncode == -signal.SIGKILL
    return lines


async def _verify(url: str, appended: set[str], committed: set[str]) -> None:
    storage = storage_at(url)
    await storage.open()
    assert set(await storage.get("s", sorted(appended))) == appended  # decoding verifies the content, too
    commits = await storage.commits("s", limit=100_000)
    assert committed <= {commit.commit_id for commit in commits}
    releases = await storage.releases("s", limit=100_000)
    assert [release.number for release in releases] == list(range(len(commits), -1, -1))
    assert all(newer.parent_id == older.release_id for newer, older in pairwise(releases))
    state = await storage.scenario("s")
    assert state is not None
    assert (state.head, state.step) == (releases[0], len(commits))
    consumed = [item.record_id for commit in commits for item in commit.consumed]
    assert len(consumed) == len(set(consumed))
    counts = await storage.counts("s")
    assert counts["consumed.trained"] == len(consumed)
    pending = await storage.pending_reports("s", 0, 100_000)
    assert len(pending) + sum(name.startswith("report") for name in consumed) == counts["report"]
    rows = await asyncio.to_thread(storage.database.read, _count)
    assert (rows["inference"], rows["report"]) == (counts["inference"], counts["report"])
    await storage.close()
    if url.startswith("sqlite:"):
        with sqlite3.connect(url.removeprefix("sqlite:")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()


def _count(connection):
    return dict(connection.execute("SELECT kind, count(*) FROM records GROUP BY kind").fetchall())
