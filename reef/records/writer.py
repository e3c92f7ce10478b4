"""Group commit: many waiting operations, one transaction, one fsync.

    event loop                                  writer thread
    submit, submit, ... ── one list per turn ──► take every list that waits
                                                 BEGIN; a savepoint for each; COMMIT (fsync)
    futures resolve ◄──── one call per group ──── outcomes

While one group is being made durable, the next one gathers.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from reef.errors import StorageError
from reef.points import Point, crossing

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], Any]
Waiting = tuple[Operation, Point | None, asyncio.Future[Any]]
Outcome = tuple[asyncio.Future[Any], Any, Exception | None]

# These mean that the caller's values or conditions are wrong; every other error of SQLite condemns the transaction.
_OF_ONE_OPERATION = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError)


class GroupWriter:
    """One thread with the only writing connection. Start, submit and close it on one event loop."""

    def __init__(
        self, connect: Callable[[], sqlite3.Connection], explain: Callable[[sqlite3.Error], StorageError]
    ) -> None:
        self._connect = connect
        self._explain = explain
        self._connection: sqlite3.Connection | None = None
        self._queue: queue.SimpleQueue[list[Waiting] | None] = queue.SimpleQueue()
        self._gathering: list[Waiting] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="reef-writer", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, operation: Callable[[sqlite3.Connection], T], point: Point | None = None) -> asyncio.Future[T]:
        """Run `operation` in the next group. The future resolves when its transaction is durable.

        What `operation` raises undoes and fails it alone; a failed transaction fails the group with StorageError.
        """
        if self._loop is None:
            raise StorageError("the database is not open")
        future: asyncio.Future[T] = self._loop.create_future()
        if not self._gathering:
            # Handed over after this turn of the loop, so that all tasks woken together end up in one group.
            self._loop.call_soon(self._hand_over)
        self._gathering.append((operation, point, future))
        return future

    async def close(self) -> None:
        """Finish what was submitted, then stop the thread and close the connection."""
        if self._loop is None:
            return
        self._loop = None
        self._hand_over()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _hand_over(self) -> None:
        if self._gathering:
            self._queue.put(self._gathering)
            self._gathering = []

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        closing = False
        while not closing:
            group: list[Waiting] = []
            received = self._queue.get()
            while True:
                if received is None:
                    closing = True
                else:
                    group += received
                try:
                    received = self._queue.get_nowait()
                except queue.Empty:
                    break
            with crossing(*{point for _, point, _ in group if point is not None}):
                outcomes = self._commit(group) if group else []
            with contextlib.suppress(RuntimeError):  # the loop is gone, and with it everyone who waited
                loop.call_soon_threadsafe(_settle, outcomes)
        if self._connection is not None:
            self._connection.close()

    def _commit(self, group: list[Waiting]) -> list[Outcome]:
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.execute("BEGIN IMMEDIATE")
            outcomes = [self._apply(self._connection, operation, future) for operation, _, future in group]
            self._connection.execute("COMMIT")
        except (sqlite3.Error, StorageError) as error:
            self._roll_back()
            return [(future, None, self._failure(error)) for _, _, future in group]
        return outcomes

    def _apply(self, connection: sqlite3.Connection, operation: Operation, future: asyncio.Future[Any]) -> Outcome:
        connection.execute("SAVEPOINT one")
        try:
            result = operation(connection)
        except Exception as error:  # whatever it is, it belongs to whoever waits for this operation
            if isinstance(error, sqlite3.Error) and not isinstance(error, _OF_ONE_OPERATION):
                raise
            connection.execute("ROLLBACK TO one")
            connection.execute("RELEASE one")
            return future, None, self._failure(error)
        connection.execute("RELEASE one")
        return future, result, None

    def _failure(self, error: Exception) -> Exception:
        return self._explain(error) if isinstance(error, sqlite3.Error) else error

    def _roll_back(self) -> None:
        """Forget the failed group; if even that fails, begin the next one with a fresh connection."""
        if self._connection is None:
            return
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            self._connection.close()
            self._connection = None


def _settle(outcomes: list[Outcome]) -> None:
    for future, result, error in outcomes:
        if future.done():  # cancelled: stored all the same
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
