"""Durable records, chain and consumption in one schema of a PostgreSQL database, for one or more processes.

It speaks the same statements as SQLite, on threads of its own; so both stores share the logic of commits, and a slow
server never holds up the event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from reef.errors import ReefError, StorageError
from reef.records import postgres_schema, rows
from reef.records.codec import Encoded
from reef.records.sql import Connection, Database
from reef.records.store import SqlStorage
from reef.records.writer import RETRY_SECONDS, GroupWriter, Outcome, Waiting

T = TypeVar("T")

log = logging.getLogger("reef.records")

IDLE_SECONDS = 10.0
"""The server ends a transaction whose process says nothing for so long: a frozen one must not keep others waiting."""

# Worth another attempt: conflicts with other transactions, and what a server that goes down or comes up says.
_CONFLICTS = (errors.SerializationFailure, errors.DeadlockDetected)
_AWAY = (errors.AdminShutdown, errors.CrashShutdown, errors.CannotConnectNow, errors.IdleInTransactionSessionTimeout)

_FULL = ("too many clients", "connection slots")
_REFUSED = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "is not permitted to log in")

# One statement, so that a group of appends costs one round trip. Inserting in the given order numbers them in it.
_APPEND = """
WITH new AS (
    INSERT INTO records (record_id, scenario, kind, created_at, digest, payload)
    SELECT record_id, scenario, kind, created_at, digest, payload
    FROM unnest(%b::text[], %b::text[], %b::text[], %b::float8[], %b::bytea[], %b::bytea[])
        WITH ORDINALITY AS given (record_id, scenario, kind, created_at, digest, payload, position)
    ORDER BY position
    ON CONFLICT (record_id) DO NOTHING
    RETURNING seq, record_id, scenario, kind, octet_length(payload) AS size
), waiting AS (
    INSERT INTO pending SELECT scenario, seq FROM new WHERE kind = 'report'
), counted AS (
    INSERT INTO counts
    SELECT scenario, name, sum(n) FROM (
        SELECT scenario, kind AS name, 1 AS n FROM new UNION ALL SELECT scenario, 'bytes', size FROM new
    ) AS added GROUP BY scenario, name ORDER BY scenario, name
    ON CONFLICT (scenario, name) DO UPDATE SET n = counts.n + excluded.n
)
SELECT record_id, seq FROM new
"""


class PostgresConnection(Connection):
    """A psycopg connection in autocommit mode, under this room's contract."""

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self.raw = raw

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> psycopg.Cursor[Any]:
        return self.raw.execute(_translated(statement), values or None)

    def close(self) -> None:
        self.raw.close()


@cache
def _translated(statement: str) -> Any:
    return statement.replace("?", "%s")


class PostgresDatabase(Database):
    """One schema. Raises StorageError for a URL that is none."""

    errors = (psycopg.Error,)
    clock = "extract(epoch from clock_timestamp())::float8"
    keep_numbers = "OVERRIDING SYSTEM VALUE"

    def __init__(self, url: str, schema: str, *, connect_timeout: float, lock_timeout: float) -> None:
        super().__init__()
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            given = None  # psycopg's message may hold the password
        if given is None:
            raise StorageError(
                "storage.url is not a URL that PostgreSQL understands: postgresql://user@host:port/database"
            )
        self.schema = schema
        self._connect_timeout = connect_timeout
        self._lock_timeout = lock_timeout
        defaults: dict[str, Any] = {
            "application_name": "reef",
            "connect_timeout": max(2, round(connect_timeout)),
            "tcp_user_timeout": round(1000 * connect_timeout),  # milliseconds; a server that vanished is noticed
            "client_encoding": "UTF8",
        }
        self._conninfo = make_conninfo("", **{**defaults, **given})
        self._place = f"{given.get('host') or 'local socket'}:{given.get('port') or 5432}/{given.get('dbname') or ''}"
        self._reached = True  # the newest read was answered: the next one is worth waiting for

    @property
    def name(self) -> str:
        return f"PostgreSQL at {self._place}, schema {self.schema}"

    # ------------------------------------------------------------------ connections

    def create_or_verify(self) -> None:
        try:
            with self.raw_connection() as raw:
                postgres_schema.create_or_verify(raw, self.schema, self.name, self.raw_connection)
        except psycopg.Error as error:
            raise self.explain(error) from error

    def exists(self) -> bool:
        try:
            with self.raw_connection() as raw:
                return postgres_schema.version(raw, self.schema, self.name) is not None
        except psycopg.Error as error:
            raise self.explain(error) from error

    def verify_readable(self) -> None:
        if not self.exists():
            raise StorageError(f"there is no database at {self.name}")

    def continue_numbers(self, connection: Connection) -> None:
        following = "(SELECT coalesce(max(seq), 0) + 1 FROM records)"
        connection.execute(f"SELECT setval(pg_get_serial_sequence('records', 'seq'), {following}, false)")

    def describe(self) -> str:
        try:
            with self.raw_connection() as raw:
                found = postgres_schema.version(raw, self.schema, self.name)
                server = f"{raw.info.server_version // 10000}.{raw.info.server_version % 10000}"
                fsync = self._durability(raw)[1]
        except psycopg.Error as error:
            raise self.explain(error) from error
        state = "is made on first use" if found is None else f"has version {found}"
        warning = "; fsync is off: what it acknowledges does not survive its machine" if fsync == "off" else ""
        return f"{self.name} (server {server}) {state}{warning}"

    def raw_connection(self) -> psycopg.Connection[Any]:
        """Without the schema's tables in its path, and not in autocommit mode."""
        return psycopg.connect(self._conninfo)

    def connect(self) -> Connection:
        raw = psycopg.connect(self._conninfo, autocommit=True)
        try:
            self._prepare(raw)
            raw.execute(f"SET lock_timeout = {round(1000 * self._lock_timeout)}")
            raw.execute(f"SET idle_in_transaction_session_timeout = {round(1000 * IDLE_SECONDS)}")
            synchronous, fsync = self._durability(raw)
            if synchronous in ("off", "local"):
                raw.execute("SET synchronous_commit = on")
            if fsync == "off":
                log.warning("%s has fsync off: what it acknowledged is lost when its machine dies", self.name)
        except BaseException:
            raw.close()
            raise
        return PostgresConnection(raw)

    def _prepare(self, raw: psycopg.Connection[Any]) -> None:
        raw.execute(f"SET search_path = {self.schema}")  # a plain name, by its configuration

    @staticmethod
    def _durability(raw: psycopg.Connection[Any]) -> tuple[str, str]:
        row = raw.execute("SELECT current_setting('synchronous_commit'), current_setting('fsync')").fetchone()
        assert row is not None
        return row[0], row[1]

    def begin(self, connection: Connection) -> None:
        # Sequence numbers are drawn before they are visible: without the lock, readers could pass over late ones.
        connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED; LOCK TABLE write_order IN EXCLUSIVE MODE")

    def read(self, query: Callable[[Connection], T]) -> T:
        deadline = time.monotonic() + (self._connect_timeout if self._reached else 0.0)
        while True:
            try:
                result = self._read_once(query)
                self._reached = True
                return result
            except psycopg.Error as error:
                self.forget_reader()
                again = self.worth_repeating(error)
                if not again or time.monotonic() >= deadline:
                    self._reached = not again
                    raise self.explain(error) from error
            time.sleep(RETRY_SECONDS)

    def _read_once(self, query: Callable[[Connection], T]) -> T:
        connection = self.reader()
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            return query(connection)
        finally:
            if not self.lost(connection):
                connection.execute("ROLLBACK")

    def connect_reader(self) -> Connection:
        raw = psycopg.connect(self._conninfo, autocommit=True)
        self._prepare(raw)
        return PostgresConnection(raw)

    # ------------------------------------------------------------------ errors

    def explain(self, error: Exception) -> StorageError:
        text = " ".join(str(error).split())
        if isinstance(error, errors.InsufficientPrivilege):
            return StorageError(
                f"{self.name}: {text}: the user of storage.url needs CREATE on the database, or a schema of its own"
            )
        if isinstance(error, errors.DiskFull):
            return StorageError(f"no space left for {self.name}: nothing was stored; free some and try again")
        if isinstance(error, errors.LockNotAvailable):
            return StorageError(f"another process holds {self.name} ({text}): nothing was stored")
        if isinstance(error, errors.TooManyConnections) or any(sign in text for sign in _FULL):
            return StorageError(f"{self.name} has no connection left ({text}): raise max_connections")
        if _refused_user(text):
            return StorageError(f"{self.name} refuses the user or password of storage.url: {text}")
        if isinstance(error, errors.UndefinedTable):
            return StorageError(f"{self.name}: {text}: the schema was dropped or is not Reef's; start Reef again")
        if self.worth_repeating(error):
            return StorageError(f"{self.name} cannot be reached: {text}; start it, or correct storage.url")
        return StorageError(f"{self.name}: {text}")

    def of_one_operation(self, error: Exception) -> bool:
        if isinstance(error, psycopg.DataError | psycopg.IntegrityError | psycopg.ProgrammingError):
            return not isinstance(error, errors.UndefinedTable | errors.InsufficientPrivilege)
        return False

    def lost(self, connection: Connection) -> bool:
        assert isinstance(connection, PostgresConnection)
        return bool(connection.raw.closed)

    def worth_repeating(self, error: Exception) -> bool:
        if isinstance(error, (*_CONFLICTS, *_AWAY)):
            return True
        if not isinstance(error, psycopg.OperationalError) or error.sqlstate:
            return False
        text = str(error)  # libpq gives no code for what keeps it from connecting
        return not _refused_user(text) and not any(sign in text for sign in ("does not exist", *_FULL))

    def roll_back(self, connection: Connection) -> None:
        assert isinstance(connection, PostgresConnection)
        connection.raw.rollback()


def _refused_user(text: str) -> bool:
    return any(sign in text for sign in _REFUSED) or ('role "' in text and "does not exist" in text)


@dataclass(slots=True, frozen=True)
class Append:
    """The operation that stores one record; a writer that sees several runs them as one statement."""

    encoded: Encoded

    def __call__(self, connection: Connection) -> tuple[int, float]:
        [stored] = append_all(connection, [self.encoded])
        if isinstance(stored, Exception):
            raise stored
        return stored


def append_all(connection: Connection, given: Sequence[Encoded]) -> list[tuple[int, float] | Exception]:
    """Sequence and time of each stored record: this one, or the equal one that was there; else its Conflict."""
    assert isinstance(connection, PostgresConnection)
    records = [encoded.record for encoded in given]
    columns = [
        [record.record_id for record in records],
        [record.scenario for record in records],
        [str(encoded.kind) for encoded in given],
        [float(record.created_at) for record in records],
        [encoded.digest for encoded in given],
        [encoded.payload for encoded in given],
    ]
    new: dict[str, int] = dict(connection.raw.execute(_APPEND, columns).fetchall())
    stored: list[tuple[int, float] | Exception] = []
    for encoded in given:  # of two with one id in this group, the first was inserted
        sequence = new.pop(encoded.record.record_id, None)
        stored.append(_existing(connection, encoded) if sequence is None else (sequence, encoded.record.created_at))
    return stored


def _existing(connection: Connection, encoded: Encoded) -> tuple[int, float] | Exception:
    row = connection.execute(
        "SELECT seq, created_at, digest FROM records WHERE record_id = ?", (encoded.record.record_id,)
    ).fetchone()
    try:
        return rows.already_stored(row, encoded)
    except ReefError as error:
        return error


class PostgresWriter(GroupWriter):
    """Appends need no savepoint: each was checked before, so none fails in the database by itself."""

    def _apply(self, connection: Connection, group: Sequence[Waiting]) -> list[Outcome]:
        appends = [(operation.encoded, future) for operation, _, future in group if isinstance(operation, Append)]
        outcomes: list[Outcome] = []
        if appends:
            stored = append_all(connection, [encoded for encoded, _ in appends])
            for (_, future), result in zip(appends, stored, strict=True):
                error = result if isinstance(result, Exception) else None
                outcomes.append((future, result, error))
        others = [waiting for waiting in group if not isinstance(waiting[0], Append)]
        return outcomes + super()._apply(connection, others)


class PostgresStorage(SqlStorage):
    """One schema of one database; several processes may use it, and a lock orders their writes.

    With `read_only` nothing is created or changed, and everything that would write raises StorageError.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: str = "reef",
        connections: int = 4,
        connect_timeout: float = 5.0,
        lock_timeout: float = 10.0,
        read_only: bool = False,
    ) -> None:
        database = PostgresDatabase(url, schema, connect_timeout=connect_timeout, lock_timeout=lock_timeout)
        super().__init__(database, readers=connections, patience=connect_timeout, read_only=read_only)

    def _make_writer(self, patience: float) -> GroupWriter:
        return PostgresWriter(self.database, patience)

    def _appending(self, encoded: Encoded) -> Callable[[Connection], tuple[int, float]]:
        for name in (encoded.record.record_id, encoded.record.scenario):
            name.encode()  # UnicodeEncodeError is a ValueError
            if "\0" in name:
                raise ValueError(f"PostgreSQL's text has no NUL, got {name!r}")
        return Append(encoded)
