"""Tables, connections and what SQLite's errors mean."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from reef.directories import sync_directory
from reef.errors import StorageError
from reef.records.sql import Connection

SCHEMA_VERSION = 2
APPLICATION_ID = 0x52454546  # "REEF" in the file's header: never write into someone else's database


class SqliteConnection(sqlite3.Connection, Connection):
    """SQLite's own connection, under this room's contract."""


# Records, releases, commits and consumption are append-only. `pending` and `counts` are derived from them, kept up in
# the same transactions, so that starting and asking never scan. Each step makes the next version of the one before;
# a new file goes through all of them. (PostgreSQL has its own, in migrations/; a base install has no tool for that.)
_STEPS = (
    """
CREATE TABLE records (
    seq INTEGER PRIMARY KEY,
    record_id TEXT NOT NULL UNIQUE,
    scenario TEXT NOT NULL,
    kind TEXT NOT NULL,
    created_at REAL NOT NULL,
    digest BLOB NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX records_page ON records (scenario, kind, seq, created_at);
CREATE TABLE pending (scenario TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (scenario, seq)) WITHOUT ROWID;
CREATE TABLE consumption (
    seq INTEGER PRIMARY KEY,
    scenario TEXT NOT NULL,
    step INTEGER NOT NULL,
    position INTEGER NOT NULL,
    disposition TEXT NOT NULL,
    reason TEXT NOT NULL
);
CREATE UNIQUE INDEX consumption_step ON consumption (scenario, step, position);
CREATE TABLE counts (
    scenario TEXT NOT NULL, name TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (scenario, name)
) WITHOUT ROWID;
CREATE TABLE scenarios (
    scenario TEXT PRIMARY KEY,
    created_at REAL NOT NULL,
    head TEXT NOT NULL,
    step INTEGER NOT NULL,
    algorithm_state TEXT NOT NULL
);
CREATE TABLE releases (
    scenario TEXT NOT NULL,
    number INTEGER NOT NULL,
    release_id TEXT NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (scenario, number),
    UNIQUE (scenario, release_id)
);
CREATE TABLE commits (
    scenario TEXT NOT NULL,
    step INTEGER NOT NULL,
    commit_id TEXT NOT NULL UNIQUE,
    job_id TEXT UNIQUE,
    digest BLOB NOT NULL,
    body TEXT NOT NULL,
    PRIMARY KEY (scenario, step)
);
CREATE TABLE sequences (name TEXT PRIMARY KEY, n INTEGER NOT NULL);
INSERT INTO sequences VALUES ('load', 0);
CREATE TABLE probe (filler BLOB NOT NULL);
INSERT INTO probe VALUES (x'');
""",
    """
ALTER TABLE consumption ADD COLUMN purged INTEGER NOT NULL DEFAULT 0;
CREATE INDEX consumption_unpurged ON consumption (seq) WHERE purged = 0;
INSERT INTO counts SELECT scenario, 'bytes', sum(length(payload)) FROM records GROUP BY scenario;
CREATE TABLE lease (holder TEXT NOT NULL, epoch INTEGER NOT NULL, expires REAL NOT NULL);
INSERT INTO lease VALUES ('', 0, 0);
""",
)


def create_or_verify(path: Path, busy_timeout: float) -> None:
    """Create the database, or make sure that this Reef understands it. Reads the header and the schema only.

    Raises StorageError saying what to do about a foreign, newer, damaged or unwritable file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = connect_writer(path, busy_timeout)
    except OSError as error:
        raise StorageError(f"cannot create {path.parent}: {error.strerror}") from error
    except sqlite3.Error as error:
        raise explain(error, path) from error
    try:
        _verify(connection, path)
    except sqlite3.Error as error:
        raise explain(error, path) from error
    finally:
        connection.close()
    sync_directory(path.parent)


def verify_readable(path: Path, busy_timeout: float) -> None:
    """Make sure that there is a database that this Reef understands, writing nothing. Raises StorageError."""
    if not path.is_file():
        raise StorageError(f"there is no database at {path}")
    try:
        connection = connect_reader(path, busy_timeout)
        try:
            _verify_header(connection, path)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise explain(error, path) from error


def read_version(path: Path) -> int:
    """The schema's version, looked at read-only. Raises StorageError."""
    try:
        connection = connect_reader(path, 1.0)
        try:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise explain(error, path) from error


def connect_writer(path: Path, busy_timeout: float) -> SqliteConnection:
    """A connection whose commits are durable: WAL, one fsync each (https://www.sqlite.org/pragma.html)."""
    connection = sqlite3.connect(
        path, timeout=busy_timeout, isolation_level=None, check_same_thread=False, factory=SqliteConnection
    )
    try:
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise StorageError(f"{path} is on a file system without shared memory for WAL: use a local disk")
        for pragma in ("synchronous=FULL", "fullfsync=ON", "checkpoint_fullfsync=ON", "cache_size=-16384"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reader(path: Path, busy_timeout: float) -> SqliteConnection:
    """A connection that cannot write. SQLite may leave an empty -wal and an -shm beside the file."""
    # Where those cannot be made (an archive) and no WAL waits to be read, the file may only be read as it is.
    archived = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if archived else ""),
        uri=True,
        timeout=busy_timeout,
        isolation_level=None,
        check_same_thread=False,
        factory=SqliteConnection,
    )


def explain(error: Exception, path: Path) -> StorageError:
    """The StorageError for `error`, saying what a person can do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code, without its extension
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StorageError(
            f"{path} is malformed ({error}): stop Reef, keep a copy of the file with its -wal and -shm, "
            f"and restore a backup or save what is readable with: sqlite3 {path.name} .recover"
        )
    if code == sqlite3.SQLITE_FULL:
        return StorageError(f"no space left for {path}: nothing was stored; free some and try again")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StorageError(f"another process holds {path} ({error}): nothing was stored")
    return StorageError(f"{path}: {error}")


def _verify(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("BEGIN IMMEDIATE")  # of two processes that create it, one waits and finds it created
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    version = _verify_header(connection, path) if tables else 0
    if tables == 0:
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    if version < SCHEMA_VERSION:
        for step in _STEPS[version:]:
            for statement in step.split(";\n"):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _verify_header(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema's version. Raises StorageError for a foreign or newer one."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise StorageError(f"{path} is a database of another program: choose another storage.path")
    if version > SCHEMA_VERSION:
        raise StorageError(f"{path} has schema {version}, this Reef knows {SCHEMA_VERSION}: use the Reef that wrote it")
    return int(version)
