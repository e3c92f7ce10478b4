"""SIGKILL at random moments: what was acknowledged is there, and nothing is half there."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from reef.records.sqlite import SqliteStorage

ROUNDS = 6


def test_sigkill_loses_nothing_acknowledged(tmp_path: Path, run):
    path = tmp_path / "reef.db"
    rng = random.Random(time.time())
    appended: set[str] = set()
    committed: set[str] = set()
    for attempt in range(ROUNDS):
        acknowledged = _write_and_die(path, f"round{attempt}", 0.1 + 0.4 * rng.random())
        appended |= {name for what, name in acknowledged if what == "append"}
        committed |= {name for what, name in acknowledged if what == "commit"}
        run(_verify(path, appended, committed))
    assert len(appended) > 100 and len(committed) > ROUNDS


def _write_and_die(path: Path, prefix: str, seconds: float) -> list[list[str]]:
    """Kill a writer `seconds` after its first acknowledgement; return what it acknowledged."""
    command = [sys.executable, "-m", "tests.records.appender", str(path), prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(seconds)  # the pipe holds 64 KiB, far more than is acknowledged meanwhile
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
    assert process.returncode == -signal.SIGKILL
    return [line.split() for line in (first + rest).splitlines() if line]


async def _verify(path: Path, appended: set[str], committed: set[str]) -> None:
    storage = SqliteStorage(path)
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
    await storage.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        stored = dict(connection.execute("SELECT kind, count(*) FROM records GROUP BY kind").fetchall())
    connection.close()
    assert (stored["inference"], stored["report"]) == (counts["inference"], counts["report"])
