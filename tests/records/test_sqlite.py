"""What only the SQLite storage promises: one file, its size, its faults."""

from __future__ import annotations

import asyncio
import random
import resource
import sqlite3
from contextlib import contextmanager
from pathlib import Path

import pytest

from reef.errors import StorageError
from reef.records import codec, schema
from reef.records.sqlite import SqliteStorage
from reef.runtime.interfaces import RecordKind, ReportRecord, Retention
from tests.records.values import base, discard, exchange, report, training, typical


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "reef.db"


@pytest.fixture
def storage(path, run):
    opened = SqliteStorage(path)
    run(opened.open())
    yield opened
    run(opened.close())


def test_a_typical_exchange_takes_less_than_a_kilobyte_of_file(storage, path, run):
    rng = random.Random(0)

    async def fill():
        await asyncio.gather(
            *(storage.append(typical(f"chatcmpl-{rng.getrandbits(96):024x}", rng)) for _ in range(1000))
        )

    run(fill())
    run(storage.close())
    assert path.stat().st_size / 1000 < 1000


def test_every_commit_is_synced(storage, run):
    connection = schema.connect_writer(storage.database.path, 1.0)
    (synchronous,) = connection.execute("PRAGMA synchronous").fetchone()
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    connection.close()
    assert (synchronous, mode) == (2, "wal")


def test_waiting_appends_share_one_transaction(storage, path, run):
    """Counted in the WAL: a header of 24 bytes before each page, bytes 4 to 8 not zero at the end of a transaction."""

    async def many(count):
        await asyncio.gather(*(storage.append(exchange(f"{count}-{number}")) for number in range(count)))

    run(many(1))
    before = _transactions(path)
    run(many(64))
    assert _transactions(path) - before <= 2


def _transactions(path: Path) -> int:
    wal = path.with_name(path.name + "-wal").read_bytes()
    frame = 24 + int.from_bytes(wal[8:12], "big")
    headers = (wal[offset : offset + 24] for offset in range(32, len(wal), frame))
    return sum(header[4:8] != bytes(4) for header in headers)


def test_a_newer_schema_is_refused(storage, path, run):
    run(storage.close())
    _execute(path, "PRAGMA user_version=3")
    with pytest.raises(StorageError, match=r"reef.db has schema 3, this Reef knows 2: use the Reef that wrote it"):
        run(SqliteStorage(path).open())


def test_a_foreign_database_is_refused_and_left_alone(path, run):
    _execute(path, "CREATE TABLE theirs (x)")
    with pytest.raises(StorageError, match="another program"):
        run(SqliteStorage(path).open())
    assert _execute(path, "SELECT name FROM sqlite_master") == [("theirs",)]


def test_a_file_that_is_no_database_is_refused(path, run):
    path.write_bytes(b"these are my notes, please keep them" * 100)
    with pytest.raises(StorageError, match=r"malformed.*restore a backup.*\.recover"):
        run(SqliteStorage(path).open())
    assert path.read_bytes().startswith(b"these are my notes")


def test_damaged_pages_are_reported(storage, path, run):
    for number in range(50):
        run(storage.append(exchange(f"e{number}", prompt="x" * number)))
    run(storage.close())
    damaged = SqliteStorage(path, read_threads=2)
    run(damaged.open())
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    with pytest.raises(StorageError, match="malformed"):
        run(SqliteStorage(path).open())
    with pytest.raises(StorageError, match="malformed"):
        run(damaged.page("s"))
    with pytest.raises(StorageError, match="malformed"):
        run(damaged.append(exchange("new")))
    run(damaged.close())


def test_a_changed_payload_is_reported(storage, path, run):
    run(storage.append(exchange("a")))
    other = codec.encode(exchange("a", prompt="other")).payload
    _execute(path, "UPDATE records SET payload = ?", other)
    with pytest.raises(StorageError, match="record a is damaged"):
        run(storage.get("s", ["a"]))


def test_an_unwritable_place_is_reported(tmp_path, run):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot create"):
        run(SqliteStorage(tmp_path / "file" / "reef.db").open())
    with pytest.raises(StorageError, match="unable to open"):
        (tmp_path / "directory.db").mkdir()
        run(SqliteStorage(tmp_path / "directory.db").open())


@contextmanager
def no_file_grows_beyond(size: int):
    """A disk that is full: writes beyond `size` fail with EFBIG in the kernel."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_fails_the_group_whole_and_recovers(storage, path, run):
    rng = random.Random(0)
    first = run(storage.append(typical("first", rng)))
    run(storage.create_scenario(base("demo")))
    size = path.with_name(path.name + "-wal").stat().st_size

    async def together():
        records = [typical(f"r{number}", rng) for number in range(50)]
        return await asyncio.gather(*map(storage.append, records), return_exceptions=True)

    with no_file_grows_beyond(size + 2_000):
        outcomes = run(together())
        assert all(isinstance(outcome, StorageError) for outcome in outcomes)
        with pytest.raises(StorageError):
            run(storage.commit(discard("c", ["first"], scenario="demo")))
        with pytest.raises(StorageError):
            run(storage.next_load_sequence())
        with pytest.raises(StorageError):
            run(storage.check())
        assert run(storage.page("demo")) == [first]  # still readable
    assert all(record.sequence > first.sequence for record in run(together()))
    run(storage.check())
    assert len(run(storage.page("demo"))) == 51
    assert run(storage.consumed("demo", ["first"])) == {}
    assert run(storage.next_load_sequence()) == 1
    assert run(storage.counts("demo"))["inference"] == 51


def test_a_full_database_says_so(storage, path, run):
    """SQLITE_FULL itself, which RLIMIT_FSIZE does not give."""
    connection = schema.connect_writer(path, 1.0)
    connection.execute("PRAGMA max_page_count=1")
    with pytest.raises(sqlite3.OperationalError) as failure:
        connection.execute(
            "CREATE TABLE filler AS WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x + 1 FROM n "
            "LIMIT 10000) SELECT x FROM n"
        )
    connection.close()
    assert "no space left" in str(schema.explain(failure.value, path))


def test_a_writer_elsewhere_times_out_and_nothing_is_lost(path, run):
    storage = SqliteStorage(path, busy_timeout=0.1)
    run(storage.open())
    blocker = schema.connect_writer(path, 1.0)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="another process holds"):
        run(storage.append(exchange("a")))
    blocker.execute("COMMIT")
    blocker.close()
    assert run(storage.append(exchange("a"))).sequence > 0
    run(storage.close())


def test_a_page_is_one_snapshot(storage, run):
    """A page never holds a record without the smaller sequences: whoever continues after it would miss them."""

    async def write():
        for number in range(150):
            await asyncio.gather(storage.append(exchange(f"e{number}")), storage.append(report(f"r{number}")))

    async def follow(writing):
        seen, after = [], 0
        while True:
            finished = writing.done()
            page = await storage.page("s", after=after, limit=7)
            seen += [record.sequence for record in page]
            after = seen[-1] if seen else 0
            if finished and not page:
                return seen

    async def both():
        writing = asyncio.ensure_future(write())
        seen = await follow(writing)
        await writing
        return seen

    assert run(both()) == list(range(1, 301))


def _fill(path: Path, exchanges: int, reports: int) -> None:
    """Straight into the tables, all but the last three reports consumed."""
    connection = schema.connect_writer(path, 1.0)
    connection.execute("BEGIN")
    statement = "INSERT INTO records VALUES (?, ?, 's', ?, 1.0, ?, ?)"
    connection.executemany(
        statement,
        ((n, f"e{n}", RecordKind.INFERENCE, b"", bytes(600)) for n in range(1, exchanges + 1)),
    )
    numbers = range(exchanges + 1, exchanges + reports + 1)
    for number in numbers:
        row = codec.encode(report(f"r{number}"))
        connection.execute(statement, (number, f"r{number}", RecordKind.REPORT, row.digest, row.payload))
    connection.executemany(
        "INSERT INTO consumption VALUES (?, 's', 1, ?, 'trained', '', 0)", ((n, n) for n in numbers[:-3])
    )
    connection.executemany("INSERT INTO pending VALUES ('s', ?)", ((n,) for n in numbers[-3:]))
    connection.execute("INSERT INTO counts VALUES ('s', 'inference', ?)", (exchanges,))
    connection.execute("COMMIT")
    connection.close()


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's count of bytes read")
def test_opening_reads_what_it_needs(storage, path, run):
    run(storage.create_scenario(base()))
    run(storage.close())
    _fill(path, 90_000, 10_000)
    assert path.stat().st_size > 60_000_000
    before = _bytes_read()
    run(storage.open())
    waiting = run(storage.pending_reports("s", 0, 1000))
    states, counts = run(storage.scenarios()), run(storage.counts("s"))
    assert _bytes_read() - before < 500_000
    assert (len(waiting), len(states), counts["inference"]) == (3, 1, 90_000)
    assert all(isinstance(record, ReportRecord) for record in waiting)
    before = _bytes_read()
    run(storage.commit(training("c", base(), [waiting[0].record_id])))
    assert len(run(storage.page("s", kind=RecordKind.REPORT, after=95_000, limit=50))) == 50
    run(storage.page("s", kind=RecordKind.REPORT, since=2.0))  # no such: the index alone says so
    assert _bytes_read() - before < 1_000_000


def _execute(path: Path, statement: str, *values: object) -> list:
    connection = sqlite3.connect(path)
    rows = connection.execute(statement, values).fetchall()
    connection.commit()
    connection.close()
    return rows


def test_an_older_file_is_brought_up_to_date(path, run):
    """As the first release of Reef made it, with records in it."""
    connection = sqlite3.connect(path)
    connection.executescript(schema._STEPS[0])
    connection.execute(f"PRAGMA application_id={schema.APPLICATION_ID}")
    connection.execute("PRAGMA user_version=1")
    for number, name in enumerate(("a", "b"), 1):
        row = codec.encode(exchange(name))
        connection.execute(
            "INSERT INTO records VALUES (?, ?, 's', 'inference', 1.0, ?, ?)", (number, name, row.digest, row.payload)
        )
    connection.execute("INSERT INTO consumption VALUES (1, 's', 1, 0, 'trained', '')")
    connection.commit()
    connection.close()
    storage = SqliteStorage(path)
    run(storage.open())
    assert run(storage.take_lease("a", 10.0))
    assert run(storage.purge(Retention(consumed_before=10.0), 10)).records == 1
    assert [bool(record.purged) for record in run(storage.page("s"))] == [True, False]
    run(storage.close())
    counted, stored, version = _execute(
        path,
        "SELECT (SELECT sum(n) FROM counts WHERE name = 'bytes'), "
        "(SELECT sum(length(payload)) FROM records), user_version FROM pragma_user_version",
    )[0]
    assert counted == stored and version == schema.SCHEMA_VERSION
