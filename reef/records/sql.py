"""What the stores share below their contract: a database that takes `?` for values, whichever it is."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from reef.errors import ReefError

T = TypeVar("T")

CHUNK = 500  # values in one statement


class Connection(ABC):
    """What the statements of this room need of a connection. It commits nothing by itself."""

    @abstractmethod
    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Any:
        """Return a cursor with `fetchone`, `fetchall` and `rowcount`."""

    @abstractmethod
    def close(self) -> None: ...


class Database(ABC):
    """One deployment's database: how to reach it, and what its errors mean. Blocking; any thread may call."""

    errors: tuple[type[Exception], ...]  # whatever the driver raises
    clock: str  # an expression: the server's Unix time, in seconds
    keep_numbers = ""  # what an INSERT says that brings its own sequence numbers

    def __init__(self) -> None:
        self._local = threading.local()
        self._readers: list[Connection] = []

    @property
    @abstractmethod
    def name(self) -> str:
        """What and where it is, for people; never a password."""

    @abstractmethod
    def create_or_verify(self) -> None:
        """Create the tables, bring older ones up to date, or raise StorageError saying what to do."""

    @abstractmethod
    def verify_readable(self) -> None:
        """Make sure that there is one that this Reef understands, changing nothing. Raises StorageError."""

    @abstractmethod
    def describe(self) -> str:
        """Look, and change nothing: what is there, for people. Raises StorageError."""

    @abstractmethod
    def connect(self) -> Connection:
        """The connection that writes; its commits are durable when they return."""

    @abstractmethod
    def begin(self, connection: Connection) -> None:
        """Begin to write: transactions that write run one after another, whatever process they are in.

        So sequences appear in their order, and whoever continues after the last one it saw misses nothing.
        """

    @abstractmethod
    def read(self, query: Callable[[Connection], T]) -> T:
        """Run a query that changes nothing in one snapshot, again if need be; StorageError for the driver's errors."""

    @abstractmethod
    def connect_reader(self) -> Connection: ...

    def reader(self) -> Connection:
        """This thread's connection for reads: a pool as large as the number of threads that read."""
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self.connect_reader()
            self._local.connection = connection
            self._readers.append(connection)
        return connection

    def forget_reader(self) -> None:
        """This thread begins with a fresh connection next time."""
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is not None:
            self._local.connection = None
            self._readers.remove(connection)
            connection.close()

    def close_readers(self) -> None:
        """Once no thread reads any more."""
        for connection in self._readers:
            connection.close()
        self._readers.clear()
        self._local = threading.local()

    @abstractmethod
    def exists(self) -> bool:
        """Whether there is something to migrate from. Raises StorageError."""

    @abstractmethod
    def continue_numbers(self, connection: Connection) -> None:
        """New records are numbered after those that brought their own numbers."""

    @abstractmethod
    def explain(self, error: Exception) -> ReefError:
        """Say what a person can do about one of `errors`."""

    @abstractmethod
    def of_one_operation(self, error: Exception) -> bool:
        """Whether the error lies with the values of one statement; every other one condemns the transaction."""

    @abstractmethod
    def lost(self, connection: Connection) -> bool:
        """Whether the connection cannot be used any more."""

    @abstractmethod
    def worth_repeating(self, error: Exception) -> bool:
        """Whether the same transaction may succeed at once: a serialization conflict, or a connection that was lost."""

    @abstractmethod
    def roll_back(self, connection: Connection) -> None: ...


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(values), CHUNK):
        yield values[first : first + CHUNK]


def marks(values: Sequence[Any]) -> str:
    """As many placeholders: `?, ?, ?`."""
    return ", ".join("?" * len(values))


def select_in(connection: Connection, statement: str, before: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """All rows of a statement with `IN ({})` in it, however many values there are."""
    rows: list[Any] = []
    for some in chunks(values):
        rows += connection.execute(statement.format(marks(some)), [*before, *some]).fetchall()
    return rows


def insert(connection: Connection, statement: str, rows: Sequence[Sequence[Any]]) -> None:
    """Insert many rows; `statement` ends before VALUES or has `{}` where they go."""
    template = statement if "{}" in statement else statement + " VALUES {}"
    for some in chunks(rows):
        groups = ", ".join(f"({marks(row)})" for row in some)
        connection.execute(template.format(groups), [value for row in some for value in row])
