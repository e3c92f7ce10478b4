"""Durable records, chain and consumption in one SQLite file."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from reef.errors import Conflict, StorageError
from reef.points import Point
from reef.records import chain, schema
from reef.records.codec import Encoded, decode, encode
from reef.records.writer import GroupWriter
from reef.runtime.interfaces import (
    Commit,
    Disposition,
    InferenceRecord,
    Record,
    RecordKind,
    Release,
    ReportRecord,
    ScenarioState,
    Storage,
)

T = TypeVar("T")

_LARGE = 64 * 1024  # bytes; compressing more than this would hold up the event loop for milliseconds
_APPENDS = {
    RecordKind.INFERENCE: Point.APPEND_RECORD,
    RecordKind.REPORT: Point.APPEND_REPORT,
    RecordKind.INSTRUCTION: Point.APPEND_INSTRUCTION,
}
_COLUMNS = "r.kind, r.record_id, r.scenario, r.created_at, r.seq, r.digest, r.payload"


class SqliteStorage(Storage):
    """One file, one event loop. Writes share one thread and its fsyncs, reads have connections of their own.

    Several processes may open the same file; SQLite's lock orders their writes. With `read_only` nothing is created
    or changed, and everything that would write raises StorageError.
    """

    def __init__(
        self, path: Path, *, busy_timeout: float = 10.0, read_threads: int = 4, read_only: bool = False
    ) -> None:
        self._path = path
        self._busy_timeout = busy_timeout
        self._read_threads = read_threads
        self._read_only = read_only
        self._writer: GroupWriter | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._reader = threading.local()
        self._reader_connections: list[sqlite3.Connection] = []

    async def open(self) -> None:
        """Raises StorageError saying what to do about a foreign, newer, damaged or unwritable file."""
        if self._readers is not None:
            return
        if self._read_only:
            await asyncio.to_thread(schema.verify_readable, self._path, self._busy_timeout)
            self._readers = ThreadPoolExecutor(self._read_threads, thread_name_prefix="reef-reader")
            return
        await asyncio.to_thread(schema.create_or_verify, self._path, self._busy_timeout)
        self._writer = GroupWriter(
            lambda: schema.connect_writer(self._path, self._busy_timeout),
            lambda error: schema.explain(error, self._path),
        )
        self._readers = ThreadPoolExecutor(self._read_threads, thread_name_prefix="reef-reader")
        self._writer.start()

    async def close(self) -> None:
        """Finish what waits, then close. A closed storage may be opened again."""
        writer, readers = self._writer, self._readers
        if readers is None:
            return
        self._writer = self._readers = None
        await asyncio.to_thread(readers.shutdown)
        for connection in self._reader_connections:
            connection.close()
        self._reader_connections.clear()
        self._reader = threading.local()
        if writer is not None:
            await writer.close()  # the last connection folds the WAL into the file

    async def append(self, record: Record) -> Record:
        encoded = await asyncio.to_thread(encode, record) if _size(record) > _LARGE else encode(record)
        sequence, created_at = await self._write(
            lambda connection: _append(connection, encoded), _APPENDS[encoded.kind]
        )
        stored = encoded.record
        stored.sequence, stored.created_at = sequence, created_at
        return stored

    async def get(self, scenario: str, record_ids: Sequence[str]) -> dict[str, Record]:
        return await self._read(lambda connection: _get(connection, scenario, record_ids))

    async def page(
        self,
        scenario: str,
        *,
        kind: RecordKind | None = None,
        after: int = 0,
        since: float | None = None,
        until: float | None = None,
        limit: int = 100,
    ) -> list[Record]:
        """Records in order of `sequence` with since <= created_at < until; at most `limit`."""
        kinds = list(RecordKind) if kind is None else [kind]
        earliest = float("-inf") if since is None else since
        latest = float("inf") if until is None else until
        return await self._read(
            lambda connection: _page(connection, scenario, kinds, after, earliest, latest, max(limit, 0))
        )

    async def pending_reports(self, scenario: str, after: int, limit: int) -> list[ReportRecord]:
        return await self._read(lambda connection: _pending_reports(connection, scenario, after, limit))

    async def consumed(self, scenario: str, record_ids: Sequence[str]) -> dict[str, Disposition]:
        return await self._read(lambda connection: _consumed(connection, scenario, record_ids))

    async def counts(self, scenario: str) -> dict[str, int]:
        return await self._read(lambda connection: _counts(connection, scenario))

    async def create_scenario(self, base: Release) -> ScenarioState:
        return await self._write(lambda connection: chain.create_scenario(connection, base), Point.CREATE_SCENARIO)

    async def scenario(self, scenario: str) -> ScenarioState | None:
        return await self._read(lambda connection: chain.read_scenario(connection, scenario))

    async def scenarios(self) -> list[ScenarioState]:
        return await self._read(chain.read_scenarios)

    async def commit(self, commit: Commit) -> Commit:
        point = Point.WRITE_OFF if commit.release is None else Point.COMMIT
        return await self._write(lambda connection: chain.apply_commit(connection, commit), point)

    async def commit_by_job(self, job_id: str) -> Commit | None:
        return await self._read(lambda connection: chain.read_commit_by_job(connection, job_id))

    async def commits(self, scenario: str, limit: int = 100) -> list[Commit]:
        return await self._read(lambda connection: chain.read_commits(connection, scenario, limit))

    async def releases(self, scenario: str, limit: int = 100) -> list[Release]:
        return await self._read(lambda connection: chain.read_releases(connection, scenario, limit))

    async def release(self, scenario: str, release_id: str) -> Release | None:
        return await self._read(lambda connection: chain.read_release(connection, scenario, release_id))

    async def next_load_sequence(self) -> int:
        return await self._write(_next_load, Point.LOAD_SEQUENCE)

    async def check(self) -> None:
        """Write 32 KiB, so that the last free page of a full disk does not pass for health."""
        await self._write(lambda connection: connection.execute("UPDATE probe SET filler = randomblob(32768)"))

    async def _write(self, operation: Callable[[sqlite3.Connection], T], point: Point | None = None) -> T:
        if self._writer is None:
            raise StorageError(f"{self._path} is not open" + (" for writing" if self._read_only else ""))
        return await self._writer.submit(operation, point)

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        if self._readers is None:
            raise StorageError(f"{self._path} is not open")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._query, query)

    def _query(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run on a reader thread, in one snapshot: a page must not hold a record without those before it."""
        try:
            connection = self._reader_connection()
            connection.execute("BEGIN")
            try:
                return query(connection)
            finally:
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise schema.explain(error, self._path) from error

    def _reader_connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._reader, "connection", None)
        if connection is None:
            connection = schema.connect_reader(self._path, self._busy_timeout)
            self._reader.connection = connection
            self._reader_connections.append(connection)
        return connection


def _size(record: Record) -> int:
    """Roughly, in bytes."""
    if not isinstance(record, InferenceRecord):
        return 0
    tokens = sum(len(generation.prompt_ids) + len(generation.output_ids) for generation in record.generations)
    return len(record.request) + len(record.response) + 4 * tokens


def _append(connection: sqlite3.Connection, encoded: Encoded) -> tuple[int, float]:
    """Return sequence and time of the stored record: this one, or the equal one that was there."""
    record = encoded.record
    cursor = connection.execute(
        "INSERT INTO records (record_id, scenario, kind, created_at, digest, payload) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (record_id) DO NOTHING",
        (record.record_id, record.scenario, encoded.kind, record.created_at, encoded.digest, encoded.payload),
    )
    sequence = cursor.lastrowid
    if cursor.rowcount == 0 or sequence is None:
        sequence, created_at, digest = connection.execute(
            "SELECT seq, created_at, digest FROM records WHERE record_id = ?", (record.record_id,)
        ).fetchone()
        if digest != encoded.digest:
            raise Conflict(f"record {record.record_id} exists with other content")
        return sequence, created_at
    if encoded.kind is RecordKind.REPORT:
        connection.execute("INSERT INTO pending VALUES (?, ?)", (record.scenario, sequence))
    chain.count(connection, record.scenario, encoded.kind)
    return sequence, record.created_at


def _get(connection: sqlite3.Connection, scenario: str, record_ids: Sequence[str]) -> dict[str, Record]:
    found = {}
    for record_id in record_ids:
        row = connection.execute(
            f"SELECT {_COLUMNS} FROM records r WHERE r.record_id = ? AND r.scenario = ?", (record_id, scenario)
        ).fetchone()
        if row is not None:
            found[record_id] = _decode(row)
    return found


def _page(
    connection: sqlite3.Connection,
    scenario: str,
    kinds: Sequence[RecordKind],
    after: int,
    earliest: float,
    latest: float,
    limit: int,
) -> list[Record]:
    """The index alone finds each kind's first `limit` rows; only the rows of the page itself are read."""
    sequences: list[int] = []
    for kind in kinds:
        rows = connection.execute(
            "SELECT seq FROM records WHERE scenario = ? AND kind = ? AND seq > ? AND created_at >= ? "
            "AND created_at < ? ORDER BY seq LIMIT ?",
            (scenario, kind, after, earliest, latest, limit),
        )
        sequences += [sequence for (sequence,) in rows]
    rows_of_page = (
        connection.execute(f"SELECT {_COLUMNS} FROM records r WHERE r.seq = ?", (sequence,)).fetchone()
        for sequence in sorted(sequences)[:limit]
    )
    return [_decode(row) for row in rows_of_page]


def _pending_reports(connection: sqlite3.Connection, scenario: str, after: int, limit: int) -> list[ReportRecord]:
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM pending p JOIN records r ON r.seq = p.seq "
        "WHERE p.scenario = ? AND p.seq > ? ORDER BY p.seq LIMIT ?",
        (scenario, after, max(limit, 0)),
    ).fetchall()
    return [record for row in rows if isinstance(record := _decode(row), ReportRecord)]


def _consumed(connection: sqlite3.Connection, scenario: str, record_ids: Sequence[str]) -> dict[str, Disposition]:
    found = {}
    for record_id in record_ids:
        row = connection.execute(
            "SELECT c.disposition FROM records r JOIN consumption c ON c.seq = r.seq "
            "WHERE r.record_id = ? AND r.scenario = ?",
            (record_id, scenario),
        ).fetchone()
        if row is not None:
            found[record_id] = Disposition(row[0])
    return found


def _counts(connection: sqlite3.Connection, scenario: str) -> dict[str, int]:
    """Every name is there, zero or not."""
    names = [*RecordKind, *(f"consumed.{disposition}" for disposition in Disposition)]
    stored = dict(connection.execute("SELECT name, n FROM counts WHERE scenario = ?", (scenario,)).fetchall())
    return {str(name): stored.get(str(name), 0) for name in names}


def _next_load(connection: sqlite3.Connection) -> int:
    connection.execute("UPDATE sequences SET n = n + 1 WHERE name = 'load'")
    value: int = connection.execute("SELECT n FROM sequences WHERE name = 'load'").fetchone()[0]
    return value


def _decode(row: tuple[str, str, str, float, int, bytes, bytes]) -> Record:
    kind, record_id, scenario, created_at, sequence, digest, payload = row
    return decode(
        RecordKind(kind),
        record_id=record_id,
        scenario=scenario,
        created_at=created_at,
        sequence=sequence,
        digest=digest,
        payload=payload,
    )
