"""Moving a deployment from one database to another: resumable, verified, and never while somebody serves from either.

    mark both ─► copy table by table, in order of the keys ─► count and hash both ─► unmark

The marks carry one random number. They keep services from starting, and tell a second run that it continues a first.
The source is left as it was.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from reef.errors import Conflict, StorageError
from reef.records import chain
from reef.records.sql import Connection, Database, insert

ROWS = 500  # that are copied or hashed at once
LEAVING, ARRIVING, ARRIVED = "leaving", "arriving", "arrived"  # names in `sequences`

Progress = Callable[[str, int, int], None]
"""Told (what, rows done, rows in all)."""


@dataclass(slots=True, frozen=True)
class Table:
    """`key` orders the rows, and comes first in `columns`."""

    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]


TABLES = (
    Table("records", ("seq",), ("seq", "record_id", "scenario", "kind", "created_at", "digest", "payload")),
    Table(
        "consumption", ("seq",), ("seq", "scenario", "step", "position", "disposition", "reason", "purged")
    ),
    Table("pending", ("scenario", "seq"), ("scenario", "seq")),
    Table("counts", ("scenario", "name"), ("scenario", "name", "n")),
    Table("scenarios", ("scenario",), ("scenario", "created_at", "head", "step", "algorithm_state")),
    Table("releases", ("scenario", "number"), ("scenario", "number", "release_id", "body")),
    Table("commits", ("scenario", "step"), ("scenario", "step", "commit_id", "job_id", "digest", "body")),
)  # fmt: skip


def refuse_while_moving(connection: Connection, name: str) -> None:
    """Raises StorageError where a migration has begun and not ended."""
    found = connection.execute("SELECT name FROM sequences WHERE name IN (?, ?)", (LEAVING, ARRIVING)).fetchone()
    if found is not None:
        raise StorageError(
            f"{name} is being migrated, or that was interrupted: run the same `reef storage migrate` again to finish, "
            "or with --abandon to give it up"
        )


def migrate(source: Database, target: Database, progress: Progress) -> dict[str, int]:
    """Copy everything; return the rows of each table. Killed anywhere, the next call goes on.

    Raises StorageError: no such source, a target that is not empty, copies that differ. Conflict: somebody serves.
    """
    if not source.exists():
        raise StorageError(f"{source.name} does not exist")
    source.create_or_verify()
    target.create_or_verify()
    with _connected(source) as old, _connected(target) as new:
        number = _begin(source, old, target, new)
        if _mark(new, ARRIVED) != number:
            for table in TABLES:
                _copy(table, source, old, target, new, progress)
            with _transaction(target, new):
                _copy_sequences(old, new)
                target.continue_numbers(new)
        copied = {table.name: _verify(table, source, old, target, new, progress) for table in TABLES}
        with _transaction(target, new):
            _unmark(new, ARRIVING)
            _set_mark(new, ARRIVED, number)
        with _transaction(source, old):
            _unmark(old, LEAVING)
    return copied


def abandon(source: Database) -> None:
    """Give up a migration that was begun: the source may serve again. What the target holds stays marked."""
    with _connected(source) as old, _transaction(source, old):
        _unmark(old, LEAVING)


def _begin(source: Database, old: Connection, target: Database, new: Connection) -> int:
    """Mark both, the target first: a source is marked only once its target knows which migration it belongs to."""
    for database, connection in ((source, old), (target, new)):
        holder = chain.read_lease(connection, database.clock)
        if holder is not None:
            raise Conflict(
                f"{holder} serves from {database.name}: stop it first "
                "(one that was killed is forgotten after storage.lease-seconds)"
            )
    if (begun := _mark(old, LEAVING)) is not None:
        if begun not in (_mark(new, ARRIVING), _mark(new, ARRIVED)):
            raise StorageError(f"{source.name} is being migrated to another database: finish that, or use --abandon")
        return begun
    if _mark(old, ARRIVING) is not None:
        raise StorageError(f"{source.name} is itself the target of a migration that has not ended")
    if any(new.execute(f"SELECT 1 FROM {table.name} LIMIT 1").fetchone() for table in TABLES):
        raise StorageError(f"{target.name} is not empty: migrate into a new one")
    number = secrets.randbits(62)
    with _transaction(target, new):
        _set_mark(new, ARRIVING, number)
    with _transaction(source, old):
        _set_mark(old, LEAVING, number)
    return number


# ---------------------------------------------------------------------------------------------- rows


def _copy(
    table: Table, source: Database, old: Connection, target: Database, new: Connection, progress: Progress
) -> None:
    """The source does not change meanwhile, so what an earlier run copied is a beginning of what is to be copied."""
    total, done = _count(table, old), _count(table, new)
    progress(f"copy {table.name}", done, total)
    for rows in _pages(table, source, old, after=_last_key(table, new)):
        columns = ", ".join(table.columns)
        with _transaction(target, new):
            insert(new, f"INSERT INTO {table.name} ({columns}) {target.keep_numbers} VALUES {{}}", rows)
        done += len(rows)
        progress(f"copy {table.name}", done, total)


def _verify(
    table: Table, source: Database, old: Connection, target: Database, new: Connection, progress: Progress
) -> int:
    total = _count(table, old)
    hashes = []
    for database, connection in ((source, old), (target, new)):
        found, done = hashlib.blake2b(digest_size=16), 0
        for rows in _pages(table, database, connection, after=None):
            for row in rows:
                found.update(repr(tuple(map(_plain, row))).encode())
            done += len(rows)
            progress(f"verify {table.name}", done, total)
        hashes.append((done, found.hexdigest()))
    if hashes[0] != hashes[1]:
        raise StorageError(
            f"the copies of table {table.name} differ: {hashes[0][0]} rows ({hashes[0][1]}) in {source.name}, "
            f"{hashes[1][0]} ({hashes[1][1]}) in {target.name}; the target must not serve: remove it, use --abandon, "
            "and migrate again"
        )
    return total


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview | bytearray) else value


def _pages(
    table: Table, database: Database, connection: Connection, after: Sequence[Any] | None
) -> Iterator[list[tuple[Any, ...]]]:
    columns, key = ", ".join(table.columns), ", ".join(table.key)
    while True:
        beyond = f"WHERE ({key}) > ({', '.join('?' * len(table.key))})" if after is not None else ""
        try:
            rows = connection.execute(
                f"SELECT {columns} FROM {table.name} {beyond} ORDER BY {key} LIMIT ?", [*(after or ()), ROWS]
            ).fetchall()
        except database.errors as error:
            raise database.explain(error) from error
        if not rows:
            return
        yield rows
        after = rows[-1][: len(table.key)]


def _last_key(table: Table, connection: Connection) -> tuple[Any, ...] | None:
    down = ", ".join(f"{column} DESC" for column in table.key)
    row = connection.execute(f"SELECT {', '.join(table.key)} FROM {table.name} ORDER BY {down} LIMIT 1").fetchone()
    return None if row is None else tuple(row)


def _count(table: Table, connection: Connection) -> int:
    return int(connection.execute(f"SELECT count(*) FROM {table.name}").fetchone()[0])


def _copy_sequences(old: Connection, new: Connection) -> None:
    statement = "INSERT INTO sequences VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET n = excluded.n"
    for name, number in old.execute("SELECT name, n FROM sequences").fetchall():
        if name not in (LEAVING, ARRIVING, ARRIVED):
            new.execute(statement, (name, number))


# ---------------------------------------------------------------------------------------------- marks, transactions


def _mark(connection: Connection, name: str) -> int | None:
    row = connection.execute("SELECT n FROM sequences WHERE name = ?", (name,)).fetchone()
    return None if row is None else int(row[0])


def _set_mark(connection: Connection, name: str, number: int) -> None:
    connection.execute(
        "INSERT INTO sequences VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET n = excluded.n", (name, number)
    )


def _unmark(connection: Connection, name: str) -> None:
    connection.execute("DELETE FROM sequences WHERE name = ?", (name,))


@contextmanager
def _connected(database: Database) -> Iterator[Connection]:
    """Raises StorageError for the driver's errors inside; each belongs to the database it comes from."""
    try:
        connection = database.connect()
    except database.errors as error:
        raise database.explain(error) from error
    try:
        yield connection
    except database.errors as error:
        raise database.explain(error) from error
    finally:
        connection.close()


@contextmanager
def _transaction(database: Database, connection: Connection) -> Iterator[None]:
    database.begin(connection)
    try:
        yield
    except BaseException:
        database.roll_back(connection)
        raise
    connection.execute("COMMIT")
