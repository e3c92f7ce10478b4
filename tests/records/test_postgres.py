"""What only the PostgreSQL storage promises: its errors, its order, its server's misfortunes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from contextlib import contextmanager

import pytest

from tests.conftest import needs

needs("psycopg", "alembic")

import psycopg  # noqa: E402

from reef.errors import Conflict, StorageError  # noqa: E402
from reef.records.postgres import PostgresStorage  # noqa: E402
from tests.postgres_server import running_server  # noqa: E402
from tests.records.values import base, discard, exchange, report, training, typical  # noqa: E402


@pytest.fixture
def storage(postgres, schema, run):
    opened = PostgresStorage(postgres.url, schema=schema, lock_timeout=100.0)
    run(opened.open())
    yield opened
    run(opened.close())


@contextmanager
def other_session(server, schema):
    with psycopg.connect(server.url, autocommit=True, options=f"-c search_path={schema}") as connection:
        yield connection


# ---------------------------------------------------------------------------------------------- opening


def refusal(run, url, **settings):
    with pytest.raises(StorageError) as failure:
        run(PostgresStorage(url, connect_timeout=60.0, **settings).open())
    assert "wrong" not in str(failure.value)  # the password
    return str(failure.value)


def test_a_server_that_is_down_is_named(tmp_path, run):
    found = refusal(run, f"postgresql://reef:wrong@/postgres?host={tmp_path}")
    assert "cannot be reached" in found and str(tmp_path) in found and "start it, or correct storage.url" in found


def test_a_wrong_password_is_said(postgres, run):
    found = refusal(run, postgres.url.replace("secret", "wrong"))
    assert "refuses the user or password of storage.url" in found


def test_an_unknown_user_and_an_unknown_database_are_said(postgres, run):
    assert "refuses the user" in refusal(run, postgres.url.replace("reef:secret", "nobody:wrong"))
    assert 'database "other" does not exist' in refusal(run, postgres.url.replace("/postgres?", "/other?"))


def test_missing_privileges_are_said(postgres, schema, run):
    postgres.execute(f"CREATE ROLE {schema} LOGIN PASSWORD 'weak'")
    found = refusal(run, postgres.url.replace("reef:secret", f"{schema}:weak"), schema=schema)
    assert "needs CREATE on the database, or a schema of its own" in found
    assert postgres.execute("SELECT count(*) FROM pg_namespace WHERE nspname = %s", schema) == [(0,)]


def test_a_schema_that_was_made_for_its_user_suffices(postgres, schema, run):
    postgres.execute(f"CREATE ROLE {schema} LOGIN PASSWORD 'weak'")
    postgres.execute(f"CREATE SCHEMA {schema} AUTHORIZATION {schema}")
    storage = PostgresStorage(postgres.url.replace("reef:secret", f"{schema}:weak"), schema=schema)
    run(storage.open())
    run(storage.append(exchange("a")))
    run(storage.close())


def test_a_newer_schema_is_refused(storage, postgres, schema, run):
    postgres.execute(f"UPDATE {schema}.alembic_version SET version_num = '9999'")
    assert "has version 9999, this Reef knows 0001: use the Reef that wrote it" in refusal(
        run, postgres.url, schema=schema
    )


def test_a_foreign_schema_is_refused_and_left_alone(postgres, schema, run):
    postgres.execute(f"CREATE SCHEMA {schema}")
    postgres.execute(f"CREATE TABLE {schema}.theirs (x int)")
    assert "another program" in refusal(run, postgres.url, schema=schema)
    tables = postgres.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", schema)
    assert tables == [("theirs",)]


def test_many_may_create_it_at_once(postgres, schema, run):
    storages = [PostgresStorage(postgres.url, schema=schema, lock_timeout=100.0) for _ in range(4)]

    async def everything():
        await asyncio.gather(*(storage.open() for storage in storages))
        await asyncio.gather(*(storage.append(exchange(f"e{n}")) for n, storage in enumerate(storages)))
        found = await storages[0].page("s")
        await asyncio.gather(*(storage.close() for storage in storages))
        return found

    assert len(run(everything())) == 4


def test_deployments_in_two_schemas_do_not_meet(storage, postgres, schema, run):
    run(storage.append(exchange("a")))
    other = PostgresStorage(postgres.url, schema=f"{schema}_other")
    run(other.open())
    assert run(other.page("s")) == []
    assert run(other.next_load_sequence()) == run(storage.next_load_sequence()) == 1
    run(other.close())


# ---------------------------------------------------------------------------------------------- writing


def test_every_commit_is_synced(storage, postgres, schema):
    postgres.execute("ALTER ROLE reef SET synchronous_commit = off")
    try:
        connection = storage.database.connect()
    finally:
        postgres.execute("ALTER ROLE reef RESET synchronous_commit")
    assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
    connection.close()


def test_waiting_appends_share_one_transaction(storage, postgres, schema, run):
    async def many():
        records = [exchange(f"e{number}") for number in range(64)] + [report(f"r{number}") for number in range(10)]
        return await asyncio.gather(*map(storage.append, records))

    assert len({record.sequence for record in run(many())}) == 74
    transactions = postgres.execute(f"SELECT count(DISTINCT xmin::text) FROM {schema}.records")
    assert transactions == [(1,)]


def test_a_group_may_hold_everything_at_once(storage, run):
    """Equal and conflicting records of one id, and operations that are no appends."""
    run(storage.create_scenario(base()))
    run(storage.append(exchange("old")))

    async def together():
        other = exchange("twice", prompt="other")
        appends = [exchange("twice"), exchange("twice"), other, exchange("old"), report("r", ["old"])]
        return await asyncio.gather(
            *map(storage.append, appends), storage.commit(discard("c", ["old"])), storage.next_load_sequence(),
            return_exceptions=True,
        )  # fmt: skip

    first, second, conflict, old, said, commit, load = run(together())
    assert first == second and isinstance(conflict, Conflict) and old.sequence < first.sequence < said.sequence
    assert (commit.step, load) == (1, 1)
    assert run(storage.counts("s"))["inference"] == 2


def test_counts_of_bytes_are_those_of_the_rows(storage, postgres, schema, run):
    async def many():
        await asyncio.gather(*(storage.append(exchange(f"e{n}", prompt="x" * n)) for n in range(30)))

    run(many())
    counted = postgres.execute(f"SELECT n FROM {schema}.counts WHERE name = 'bytes'")
    assert counted == postgres.execute(f"SELECT sum(octet_length(payload))::bigint FROM {schema}.records")


def test_nul_is_refused_alone(storage, run):
    async def together():
        return await asyncio.gather(*map(storage.append, [exchange("a\0b"), exchange("c")]), return_exceptions=True)

    refused, stored = run(together())
    assert isinstance(refused, ValueError) and "NUL" in str(refused)
    assert stored.sequence > 0


def test_followers_miss_nothing_that_several_processes_write(postgres, schema, run):
    """Sequences appear in their order, whoever writes: whoever continues after the last one sees every record."""

    async def everything():
        storages = [PostgresStorage(postgres.url, schema=schema, lock_timeout=100.0) for _ in range(3)]
        await asyncio.gather(*(storage.open() for storage in storages))

        async def write(storage, name):
            for number in range(40):
                await asyncio.gather(*(storage.append(exchange(f"{name}-{number}-{k}")) for k in range(3)))

        writing = asyncio.gather(*(write(storage, str(n)) for n, storage in enumerate(storages)))
        seen, after = [], 0
        while True:
            finished = writing.done()
            page = await storages[0].page("s", after=after, limit=50)
            seen += [record.sequence for record in page]
            after = seen[-1] if seen else 0
            if finished and not page:
                break
        await writing
        await asyncio.gather(*(storage.close() for storage in storages))
        return seen

    seen = run(everything())
    assert len(seen) == 360 and seen == sorted(seen)


def test_commits_of_two_processes_compete_and_one_wins(storage, postgres, schema, run):
    head = run(storage.create_scenario(base())).head
    other = PostgresStorage(postgres.url, schema=schema, lock_timeout=100.0)
    run(other.open())

    async def race():
        commits = [s.commit(training(f"c{n}", head, [])) for n, s in enumerate([storage, other] * 5)]
        return await asyncio.gather(*commits, return_exceptions=True)

    outcomes = run(race())
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 9
    assert len(run(storage.releases("s"))) == 2
    run(other.close())


def test_a_writer_elsewhere_times_out_and_nothing_is_lost(postgres, schema, run):
    storage = PostgresStorage(postgres.url, schema=schema, lock_timeout=0.3)
    run(storage.open())
    with other_session(postgres, schema) as blocker:
        blocker.execute("BEGIN; LOCK TABLE write_order IN EXCLUSIVE MODE")
        with pytest.raises(StorageError, match="another process holds"):
            run(storage.append(exchange("a")))
        blocker.execute("COMMIT")
    assert run(storage.append(exchange("a"))).sequence > 0
    run(storage.close())


def test_a_deadlock_is_tried_again(storage, postgres, schema, run):
    """Somebody's maintenance holds a table that we need, and wants the lock that we hold."""
    run(storage.append(exchange("a")))
    runs, ours_holds, theirs_waits = [], threading.Event(), threading.Event()

    def operation(connection):
        runs.append("run")
        ours_holds.set()
        assert theirs_waits.wait(100)
        return connection.execute("SELECT count(*) FROM records").fetchone()

    async def deadlock(theirs):
        writing = asyncio.ensure_future(storage._write(operation))
        await asyncio.to_thread(ours_holds.wait, 100)
        locking = asyncio.ensure_future(
            asyncio.to_thread(theirs.execute, "LOCK TABLE write_order IN EXCLUSIVE MODE; COMMIT")
        )
        while not await asyncio.to_thread(postgres.execute, "SELECT 1 FROM pg_locks WHERE NOT granted"):
            await asyncio.sleep(0.01)
        theirs_waits.set()  # whoever comes last looks for a deadlock, after 100 ms
        await locking
        return await writing

    with other_session(postgres, schema) as theirs:
        theirs.execute("SET deadlock_timeout = '1h'")  # so that it is never the one which gives up
        theirs.execute("BEGIN; LOCK TABLE records IN ACCESS EXCLUSIVE MODE")
        assert run(deadlock(theirs)) == (1,) and len(runs) >= 2
    log = (postgres.directory / "log").read_text()
    assert "deadlock detected" in log


def test_a_frozen_process_does_not_keep_others_from_writing(postgres, schema, run, monkeypatch):
    """It holds the lock and says nothing: the server ends its transaction, and it begins again when it wakes."""
    monkeypatch.setattr("reef.records.postgres.IDLE_SECONDS", 0.2)
    frozen, other = (PostgresStorage(postgres.url, schema=schema, lock_timeout=100.0) for _ in range(2))
    runs, begun, awake = [], threading.Event(), threading.Event()

    def operation(connection):
        runs.append("run")
        begun.set()
        awake.wait(200)
        return connection.execute("SELECT 1").fetchone()

    async def everything():
        await frozen.open()
        await other.open()
        waiting = asyncio.ensure_future(frozen._write(operation))
        await asyncio.to_thread(begun.wait, 200)
        stored = await other.append(exchange("a"))  # or it would wait for the lock in vain
        awake.set()
        return stored, await waiting

    stored, result = run(everything())
    assert stored.sequence > 0 and result == (1,) and len(runs) >= 2
    run(frozen.close())
    run(other.close())


# ---------------------------------------------------------------------------------------------- misfortune


def test_a_killed_backend_loses_nothing(postgres, schema, run):
    """The server ends our sessions under load; what was acknowledged is there, and nobody heard of it."""
    storage = PostgresStorage(postgres.url, schema=schema, connect_timeout=200.0)
    stored: list[str] = []

    async def client(name):
        for number in range(15):
            stored.append((await storage.append(exchange(f"{name}-{number}"))).record_id)
            await storage.page("s", limit=1)

    async def load():
        await storage.open()
        clients = [asyncio.ensure_future(client(str(n))) for n in range(8)]
        for enough in (10, 40, 70):
            while len(stored) < enough:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(
                postgres.execute,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND backend_type = 'client backend' AND application_name = 'reef'",
            )
        await asyncio.gather(*clients)

    run(load())
    assert set(run(storage.get("s", stored))) == set(stored) and len(stored) == 120
    assert run(storage.counts("s"))["inference"] == 120
    run(storage.close())


def test_a_server_that_dies_and_comes_back(run):
    """Killed under load: writes wait for it or fail with the reason, and nothing acknowledged is lost."""
    with running_server() as server:
        storage = PostgresStorage(server.url, connect_timeout=60.0)
        run(storage.open())
        storage.database._connect_timeout = storage._writer._patience = 0.4
        run(_survive(server, storage, random.Random(1)))
        run(storage.close())


async def _survive(server, storage, rng):
    stored, failures, stop = [], [], asyncio.Event()

    async def client(name):
        number = 0
        while not stop.is_set():
            number += 1
            record = typical(f"{name}-{number}", rng, scenario="s")
            try:
                stored.append((await storage.append(record)).record_id)
            except StorageError as error:
                failures.append(str(error))
                await asyncio.sleep(0.05)

    clients = [asyncio.ensure_future(client(str(n))) for n in range(8)]
    await asyncio.sleep(0.5)
    await asyncio.to_thread(server.kill)
    while not failures:
        await asyncio.sleep(0.05)
    with pytest.raises(StorageError, match="cannot be reached") as reason:  # what /healthz says
        await storage.check()
    assert "storage.url" in str(reason.value)
    with pytest.raises(StorageError, match="cannot be reached"):
        await storage.page("s")
    before = len(stored)
    await asyncio.to_thread(server.start)
    while len(stored) < before + 30:
        await asyncio.sleep(0.05)
    stop.set()
    await asyncio.gather(*clients)
    await storage.check()
    found = await storage.get("s", stored)
    assert set(found) == set(stored)
    assert (await storage.counts("s"))["inference"] >= len(stored)


def test_a_migration_that_is_killed_left_nothing(postgres, schema, run):
    """The whole migration is one transaction; its process dies in the middle."""
    from reef.records import postgres_schema

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        import psycopg as own

        def connect():
            connection = own.connect(postgres.url)
            execute = connection.cursor_factory.execute

            class DyingCursor(own.Cursor):
                def execute(self, query, *arguments, **options):
                    if "CREATE TABLE commits" in str(query):
                        os.write(write, b"here")
                        os.kill(os.getpid(), signal.SIGKILL)
                    return execute(self, query, *arguments, **options)

            connection.cursor_factory = DyingCursor
            return connection

        postgres_schema._migrate(schema, "x", connect)
        os._exit(0)
    os.close(write)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert os.read(read, 4) == b"here"
    os.close(read)
    storage = PostgresStorage(postgres.url, schema=schema)
    run(storage.open())
    run(storage.append(exchange("a")))
    run(storage.close())
