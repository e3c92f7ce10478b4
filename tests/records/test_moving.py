"""`reef storage migrate` between the two stores: everything, resumed after a kill, refused where it would lose."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.conftest import needs

needs("psycopg", "alembic")

from reef.errors import Conflict, StorageError  # noqa: E402
from reef.records import moving  # noqa: E402
from reef.records.opening import storage_at  # noqa: E402
from reef.runtime.interfaces import Retention  # noqa: E402
from tests.records.values import base, discard, exchange, report, training  # noqa: E402


def nothing(what: str, done: int, total: int) -> None: ...


@pytest.fixture
def urls(tmp_path, postgres, schema):
    return {"sqlite": f"sqlite:{tmp_path / 'reef.db'}", "postgres": f"{postgres.url}&schema={schema}"}


@pytest.fixture(params=["sqlite", "postgres"])
def source(request, urls):
    return urls[request.param]


@pytest.fixture
def target(source, urls):
    [other] = set(urls.values()) - {source}
    return other


async def fill(url: str, records: int = 40) -> None:
    storage = storage_at(url)
    await storage.open()
    head = (await storage.create_scenario(base())).head
    await storage.create_scenario(base("ü"))
    await asyncio.gather(*(storage.append(exchange(f"e{n:05}", prompt="x" * (n % 7))) for n in range(records)))
    await asyncio.gather(*(storage.append(report(f"r{n}", [f"e{n:05}"])) for n in range(10)))
    await storage.append(exchange("elsewhere", scenario="ü"))
    stored = await storage.commit(training("c1", head, ["e00000", "r0"]))
    await storage.commit(training("c2", stored.release, ["e00001", "r1"]))
    await storage.commit(discard("c3", ["r2"]))
    await storage.purge(Retention(consumed_before=150.0), 1)
    for _ in range(3):
        await storage.next_load_sequence()
    await storage.close()


async def everything(url: str) -> dict:
    storage = storage_at(url)
    await storage.open()
    found = {
        "scenarios": await storage.scenarios(),
        "pages": [await storage.page(name, limit=10_000) for name in ("s", "ü")],
        "pending": await storage.pending_reports("s", 0, 100),
        "counts": [await storage.counts(name) for name in ("s", "ü")],
        "commits": await storage.commits("s"),
        "releases": await storage.releases("s"),
        "fates": await storage.consumed("s", [f"e{n:05}" for n in range(5)]),
    }
    await storage.close()
    return found


async def goes_on(url: str) -> None:
    """What was moved is written to as if nothing had happened."""
    storage = storage_at(url)
    await storage.open()
    [state] = [state for state in await storage.scenarios() if state.scenario == "s"]
    last = (await storage.page("s", limit=10_000))[-1].sequence
    assert (await storage.append(exchange("new"))).sequence > last
    assert await storage.next_load_sequence() == 4
    assert (await storage.commit(training("c4", state.head, ["new", "r3"]))).step == 4
    with pytest.raises(Conflict, match="consumed"):
        await storage.commit(discard("c5", ["e00000"]))
    await storage.close()


def move(source: str, target: str, progress=nothing) -> dict[str, int]:
    return moving.migrate(storage_at(source).database, storage_at(target).database, progress)


def test_everything_arrives(source, target, run):
    run(fill(source))
    before = run(everything(source))
    copied = move(source, target)
    assert (copied["records"], copied["commits"], copied["releases"], copied["pending"]) == (51, 3, 4, 7)
    assert run(everything(target)) == before == run(everything(source))
    run(goes_on(target))


@pytest.mark.parametrize("step", ["copy records", "copy commits", "verify records", "verify commits"])
def test_killed_and_run_again(source, target, step, run):
    run(fill(source, records=1100))
    before = run(everything(source))
    child = os.fork()
    if child == 0:

        def dying(what: str, done: int, total: int) -> None:
            if what == step and done > 0:
                os.kill(os.getpid(), signal.SIGKILL)

        move(source, target, dying)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    for url in (source, target):
        with pytest.raises(StorageError, match=r"being migrated.*run the same .*again"):
            run(storage_at(url).open())
    steps: list[tuple[str, int, int]] = []
    move(source, target, lambda *told: steps.append(told))
    if step == "copy records":
        assert steps[0] == ("copy records", 500, 1111)  # not from the beginning
    assert run(everything(target)) == before
    run(goes_on(target))


def test_killed_between_the_last_marks(source, target, run, monkeypatch):
    run(fill(source))
    unmark = moving._unmark

    def failing(connection, name):
        if name == moving.LEAVING:
            raise KeyboardInterrupt
        unmark(connection, name)

    monkeypatch.setattr(moving, "_unmark", failing)
    with pytest.raises(KeyboardInterrupt):
        move(source, target)
    monkeypatch.undo()
    move(source, target)
    assert run(everything(target)) == run(everything(source))


def test_a_running_service_is_not_moved_away_from(source, target, run):
    run(fill(source))
    serving = storage_at(source)
    run(serving.open())
    assert run(serving.take_lease("gateway on host", 60.0))
    with pytest.raises(Conflict, match="gateway on host serves from"):
        move(source, target)
    run(serving.end_lease())
    run(serving.close())
    move(source, target)


def test_a_target_that_serves_or_is_not_empty_is_refused(source, target, run):
    run(fill(source))
    run(fill(target, records=20))
    with pytest.raises(StorageError, match="is not empty"):
        move(source, target)
    run(everything(source))  # not marked


def test_a_source_that_is_not_there_is_not_made(source, target, tmp_path):
    with pytest.raises(StorageError, match="does not exist"):
        move(source, target)
    assert not (tmp_path / "reef.db").exists()


def test_another_target_is_refused_and_abandoning_frees_the_source(source, target, tmp_path, run):
    run(fill(source))

    def interrupting(what: str, done: int, total: int) -> None:
        if what == "copy counts":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        move(source, target, interrupting)
    third = f"sqlite:{tmp_path / 'third.db'}"
    with pytest.raises(StorageError, match="migrated to another database"):
        move(source, third)
    moving.abandon(storage_at(source).database)
    move(source, third)
    assert run(everything(third)) == run(everything(source))
    with pytest.raises(StorageError, match="being migrated"):
        run(storage_at(target).open())  # half a copy never serves


def test_a_copy_that_differs_is_noticed(source, target, run):
    run(fill(source))

    def meddling(what: str, done: int, total: int) -> None:
        if what == "verify records" and not meddled:
            meddled.append(what)
            database = storage_at(target).database
            connection = database.connect()
            connection.execute("UPDATE commits SET body = 'other' WHERE step = 2")
            connection.close()

    meddled: list[str] = []
    with pytest.raises(StorageError, match="the copies of table commits differ: 3 rows"):
        move(source, target, meddling)
    with pytest.raises(StorageError, match="being migrated"):
        run(storage_at(target).open())
