"""Durable records, chain and consumption in one SQLite file."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from reef.errors import StorageError
from reef.records import chain, rows, schema
from reef.records.codec import Encoded
from reef.records.sql import Connection, Database, insert
from reef.records.store import SqlStorage
from reef.records.writer import GroupWriter, Outcome, Waiting
from reef.runtime.interfaces import RecordKind

T = TypeVar("T")

ROWS = 100  # most records in one statement

# These mean that the caller's values or conditions are wrong; every other error of SQLite condemns the transaction.
_OF_ONE_OPERATION = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError)


class SqliteDatabase(Database):
    """One file."""

    errors = (sqlite3.Error,)
    clock = "((julianday('now') - 2440587.5) * 86400.0)"

    def __init__(self, path: Path, busy_timeout: float) -> None:
        self.path = path
        super().__init__()
        self._busy_timeout = busy_timeout

    @property
    def name(self) -> str:
        return str(self.path)

    def create_or_verify(self) -> None:
        schema.create_or_verify(self.path, self._busy_timeout)

    def verify_readable(self) -> None:
        schema.verify_readable(self.path, self._busy_timeout)

    def describe(self) -> str:
        version = schema.read_version(self.path) if self.path.exists() else None
        return f"{self.path} is made on first use" if version is None else f"{self.path} has schema {version}"

    def exists(self) -> bool:
        return self.path.exists() and schema.read_version(self.path) > 0

    def connect(self) -> Connection:
        return schema.connect_writer(self.path, self._busy_timeout)

    def begin(self, connection: Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")

    def read(self, query: Callable[[Connection], T]) -> T:
        try:
            connection = self.reader()
            connection.execute("BEGIN")
            try:
                return query(connection)
            finally:
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self.explain(error) from error

    def connect_reader(self) -> Connection:
        return schema.connect_reader(self.path, self._busy_timeout)

    def continue_numbers(self, connection: Connection) -> None:
        """SQLite goes on after the greatest by itself."""

    def explain(self, error: Exception) -> StorageError:
        return schema.explain(error, self.path)

    def of_one_operation(self, error: Exception) -> bool:
        return isinstance(error, _OF_ONE_OPERATION)

    def lost(self, connection: Connection) -> bool:
        assert isinstance(connection, sqlite3.Connection)
        try:
            return connection.total_changes < 0
        except sqlite3.ProgrammingError:  # closed
            return True

    def worth_repeating(self, error: Exception) -> bool:
        return False  # SQLite itself waits for others, up to the busy timeout

    def roll_back(self, connection: Connection) -> None:
        assert isinstance(connection, sqlite3.Connection)
        if connection.in_transaction:
            connection.execute("ROLLBACK")


class SqliteStorage(SqlStorage):
    """One file; several processes may open it, and SQLite's lock orders their writes.

    With `read_only` nothing is created or changed, and everything that would write raises StorageError.
    """

    def __init__(
        self, path: Path, *, busy_timeout: float = 10.0, read_threads: int = 4, read_only: bool = False
    ) -> None:
        super().__init__(SqliteDatabase(path, busy_timeout), readers=read_threads, read_only=read_only)

    def _make_writer(self, patience: float) -> GroupWriter:
        return SqliteWriter(self.database, patience)

    def _appending(self, encoded: Encoded) -> Callable[[Connection], tuple[int, float]]:
        return Append(encoded)


@dataclass(slots=True, frozen=True)
class Append:
    """The operation that stores one record; a writer that sees several runs them as one statement."""

    encoded: Encoded

    def __call__(self, connection: Connection) -> tuple[int, float]:
        """Sequence and time of the stored record: this one, or the equal one that was there. Raises Conflict."""
        record = self.encoded.record
        if (sequence := append_new(connection, [self.encoded])) is not None:
            return sequence, record.created_at
        found = connection.execute(
            "SELECT seq, created_at, digest FROM records WHERE record_id = ?", (record.record_id,)
        ).fetchone()
        return rows.already_stored(found, self.encoded)


class SqliteWriter(GroupWriter):
    """Each statement gives up the interpreter's lock and has to get it back: so a group's appends are a few for all."""

    def _attempt(self, group: list[Waiting]) -> list[Outcome]:
        appends = [(operation.encoded, future) for operation, _, future in group if isinstance(operation, Append)]
        connection = self._begun()
        outcomes: list[Outcome] = []
        for some in (appends[start : start + ROWS] for start in range(0, len(appends), ROWS)):
            try:
                last = append_new(connection, [encoded for encoded, _ in some])
            except Exception as error:  # perhaps of one of them alone
                if isinstance(error, self._database.errors) and not self._database.of_one_operation(error):
                    raise
                last = None
            if last is None:  # not all are new and well: one by one
                connection.execute("ROLLBACK")
                return super()._attempt(group)
            for sequence, (encoded, future) in enumerate(some, last - len(some) + 1):
                outcomes.append((future, (sequence, encoded.record.created_at), None))
        outcomes += self._apply(connection, [one for one in group if not isinstance(one[0], Append)])
        connection.execute("COMMIT")
        return outcomes


def append_new(connection: Connection, given: Sequence[Encoded]) -> int | None:
    """Store them in order, with sequences one after another, and return the last; None: some, not all, were new."""
    values: list[Any] = []
    counted: Counter[tuple[str, str]] = Counter()
    for encoded in given:
        record = encoded.record
        values += (record.record_id, record.scenario, encoded.kind, record.created_at, encoded.digest, encoded.payload)
        counted[record.scenario, encoded.kind] += 1
        counted[record.scenario, rows.BYTES] += len(encoded.payload)
    places = ", ".join(["(?, ?, ?, ?, ?, ?)"] * len(given))
    cursor = connection.execute(
        "INSERT INTO records (record_id, scenario, kind, created_at, digest, payload) "
        f"VALUES {places} ON CONFLICT (record_id) DO NOTHING",
        values,
    )
    last: int = cursor.lastrowid
    if cursor.rowcount != len(given):
        return None
    numbered = enumerate(given, last - len(given) + 1)
    reports = [(one.record.scenario, sequence) for sequence, one in numbered if one.kind is RecordKind.REPORT]
    insert(connection, "INSERT INTO pending", reports)
    chain.add_counts(connection, counted)
    return last
