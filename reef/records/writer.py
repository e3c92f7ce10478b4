"""Group commit: many waiting operations, one transaction, one fsync.

    event loop                                  writer thread
    submit, submit, ... ── one list per turn ──► take every list that waits
                                                 BEGIN; a savepoint for each; COMMIT (fsync)
    futures resolve ◄──── one call per group ──── outcomes

While one group is being made durable, the next one gathers. Every operation may be repeated, so a group whose
transaction lost against another one, or its connection, is tried again before anybody hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from reef.errors import StorageError
from reef.metrics import GROUP_SIZE, WAITING_WRITES
from reef.points import Point, crossing
from reef.records.sql import Connection, Database

T = TypeVar("T")
Operation = Callable[[Connection], Any]
Waiting = tuple[Operation, Point | None, asyncio.Future[Any]]
Outcome = tuple[asyncio.Future[Any], Any, Exception | None]

RETRY_SECONDS = 0.1  # between attempts


class GroupWriter:
    """One thread with the only writing connection. Start, submit and close it on one event loop."""

    def __init__(self, database: Database, patience: float = 0.0) -> None:
        """`patience`: seconds for which a group is tried again while the database is away."""
        self._database = database
        self._patience = patience
        self._reached = True  # the newest group was stored or refused, not lost: the next one is worth waiting for
        self._connection: Connection | None = None
        self._queue: queue.SimpleQueue[list[Waiting] | None] = queue.SimpleQueue()
        self._gathering: list[Waiting] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="reef-writer", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, operation: Callable[[Connection], T], point: Point | None = None) -> asyncio.Future[T]:
        """Run `operation` in the next group. The future resolves when its transaction is durable.

        What `operation` raises undoes and fails it alone; a failed transaction fails the group with StorageError.
        It may run more than once, and must come to the same.
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
            WAITING_WRITES.inc(len(self._gathering))
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
            if group:
                GROUP_SIZE.observe(len(group))
                WAITING_WRITES.dec(len(group))
            with contextlib.suppress(RuntimeError):  # the loop is gone, and with it everyone who waited
                loop.call_soon_threadsafe(_settle, outcomes)
        if self._connection is not None:
            self._connection.close()

    def _commit(self, group: list[Waiting]) -> list[Outcome]:
        deadline = time.monotonic() + (self._patience if self._reached else 0.0)
        while True:
            try:
                outcomes = self._attempt(group)
                self._reached = True
                return outcomes
            except Exception as error:
                mine = isinstance(error, self._database.errors)
                if not mine and not isinstance(error, StorageError):
                    raise
                self._roll_back()
                again = mine and self._database.worth_repeating(error)
                if not again or time.monotonic() >= deadline:
                    self._reached = not again
                    return [(future, None, self._failure(error)) for _, _, future in group]
            time.sleep(RETRY_SECONDS)

    def _attempt(self, group: list[Waiting]) -> list[Outcome]:
        connection = self._begun()
        outcomes = self._apply(connection, group)
        connection.execute("COMMIT")
        return outcomes

    def _begun(self) -> Connection:
        """The connection, in a new transaction."""
        if self._connection is None:
            self._connection = self._database.connect()
        self._database.begin(self._connection)
        return self._connection

    def _apply(self, connection: Connection, group: Sequence[Waiting]) -> list[Outcome]:
        """Run the group inside its transaction. Raises what condemns the transaction."""
        return [self._apply_one(connection, operation, future) for operation, _, future in group]

    def _apply_one(self, connection: Connection, operation: Operation, future: asyncio.Future[Any]) -> Outcome:
        connection.execute("SAVEPOINT one")
        try:
            result = operation(connection)
        except Exception as error:  # whatever it is, it belongs to whoever waits for this operation
            if isinstance(error, self._database.errors) and not self._database.of_one_operation(error):
                raise
            connection.execute("ROLLBACK TO SAVEPOINT one")
            connection.execute("RELEASE SAVEPOINT one")
            return future, None, self._failure(error)
        connection.execute("RELEASE SAVEPOINT one")
        return future, result, None

    def _failure(self, error: Exception) -> Exception:
        return self._database.explain(error) if isinstance(error, self._database.errors) else error

    def _roll_back(self) -> None:
        """Forget the failed group; if even that fails, begin the next one with a fresh connection."""
        if self._connection is None:
            return
        try:
            if not self._database.lost(self._connection):
                self._database.roll_back(self._connection)
        except self._database.errors:
            pass
        else:
            if not self._database.lost(self._connection):
                return
        with contextlib.suppress(*self._database.errors):
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
