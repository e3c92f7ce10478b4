"""`reef storage migrate` and `reef storage compact` as a person runs them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from reef.records.opening import storage_at
from tests.records.values import base, discard, typical

ROOT = Path(__file__).parent.parent
MODEL = "--inference.model-path=m"


def reef(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "reef.cli", "storage", *map(str, arguments)],
        cwd=cwd, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


async def fill(url: str) -> None:
    import random

    storage = storage_at(url)
    await storage.open()
    await storage.create_scenario(base())
    rng = random.Random(0)
    names = [f"e{n}" for n in range(300)]
    await asyncio.gather(*(storage.append(typical(name, rng, scenario="s")) for name in names))
    await storage.commit(discard("c", names[:250]))
    await storage.close()


@pytest.fixture
def data(tmp_path) -> Path:
    (tmp_path / "data").mkdir()
    asyncio.run(fill(f"sqlite:{tmp_path / 'data/reef.db'}"))
    return tmp_path


async def purged(url: str) -> tuple[int, int]:
    storage = storage_at(url)
    await storage.open()
    page = await storage.page("s", limit=1000)
    await storage.close()
    return len(page), sum(bool(record.purged) for record in page)


def test_migrate_says_what_it_moved_and_where_to_serve_from(data):
    done = reef("migrate", "--from", "sqlite:data/reef.db", "--to", "sqlite:new.db", cwd=data)
    assert done.returncode == 0, done.stderr
    assert "moved 300 records, 250 consumption" in done.stdout and "the same in both, by count and hash" in done.stdout
    assert asyncio.run(purged(f"sqlite:{data / 'new.db'}")) == (300, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "sqlite:missing.db", "--to", "sqlite:new.db"], "missing.db does not exist"),
        (["--from", "mysql://x", "--to", "sqlite:new.db"], "a database is given as sqlite:PATH or postgresql://"),
        (["--from", "sqlite:data/reef.db", "--to", "sqlite:data/reef.db"], "is not empty"),
    ],
)
def test_migrate_refuses_in_one_line(data, arguments, message):
    done = reef("migrate", *arguments, cwd=data)
    assert done.returncode != 0 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_compact_empties_what_is_old_and_gives_the_space_back(data):
    before = (data / "data/reef.db").stat().st_size
    done = reef("compact", MODEL, "--reef.data-dir=data", "--storage.retention-days=1", cwd=data)
    assert done.returncode == 0, done.stderr
    assert "emptied 250 records" in done.stdout
    assert asyncio.run(purged(f"sqlite:{data / 'data/reef.db'}")) == (300, 250)
    assert (data / "data/reef.db").stat().st_size < 0.75 * before


def test_compact_writes_off_only_where_nothing_trains(data):
    async def beside_a_service() -> subprocess.CompletedProcess[str]:
        storage = storage_at(f"sqlite:{data / 'data/reef.db'}")
        await storage.open()
        assert await storage.take_lease("the service", 60.0)
        done = await asyncio.to_thread(run)
        await storage.end_lease()
        await storage.close()
        return done

    def run() -> subprocess.CompletedProcess[str]:
        return reef("compact", MODEL, "--reef.data-dir=data", "--storage.retention-unreported-days=1",
                    "--storage.retention-days=1", cwd=data)  # fmt: skip

    beside = asyncio.run(beside_a_service())
    assert beside.returncode == 0 and "it alone writes off" in beside.stderr and "emptied 250" in beside.stdout
    alone = run()
    assert alone.returncode == 0 and "emptied 50" in alone.stdout


def test_compact_needs_a_limit(data):
    done = reef("compact", MODEL, "--reef.data-dir=data", cwd=data)
    assert done.returncode == 2 and "storage.retention-days" in done.stderr
