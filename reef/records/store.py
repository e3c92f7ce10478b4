"""The storage contract over any database of this room: writes in groups on one thread, reads on others."""

from __future__ import annotations

import asyncio
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from reef.errors import StorageError
from reef.metrics import APPEND_SECONDS, APPENDED_BYTES
from reef.points import Point
from reef.records import chain, moving, rows
from reef.records.codec import Encoded, encode
from reef.records.sql import Connection, Database
from reef.records.writer import GroupWriter
from reef.runtime.interfaces import (
    Commit,
    Disposition,
    InferenceRecord,
    PurgeResult,
    Record,
    RecordKind,
    Release,
    ReportRecord,
    Retention,
    ScenarioState,
    Storage,
)
from reef.tracing import span

T = TypeVar("T")

_LARGE = 64 * 1024  # bytes; compressing more than this would hold up the event loop for milliseconds
_APPENDS = {
    RecordKind.INFERENCE: Point.APPEND_RECORD,
    RecordKind.REPORT: Point.APPEND_REPORT,
    RecordKind.INSTRUCTION: Point.APPEND_INSTRUCTION,
}


class SqlStorage(Storage):
    """One database, one event loop. Writes share one thread and its fsyncs, reads have connections of their own.

    Several processes may use one database; it orders their writes.
    """

    def __init__(self, database: Database, *, readers: int, patience: float = 0.0, read_only: bool = False) -> None:
        """`patience`: seconds for which a write waits for a database that is away."""
        self.database = database
        self._num_readers = readers
        self._patience = patience
        self._read_only = read_only
        self._writer: GroupWriter | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._lease = ""  # the tenure that this storage commits under

    async def open(self) -> None:
        """Raises StorageError saying what to do about a foreign, newer, damaged, unreachable or unwritable one."""
        if self._readers is not None:
            return
        prepare = self.database.verify_readable if self._read_only else self.database.create_or_verify
        await asyncio.to_thread(prepare)
        self._readers = ThreadPoolExecutor(self._num_readers, thread_name_prefix="reef-reader")
        if self._read_only:
            return
        try:
            await self._read(partial(moving.refuse_while_moving, name=self.database.name))
        except BaseException:
            await self._close_readers()
            raise
        self._writer = self._make_writer(self._patience)
        self._writer.start()

    def _make_writer(self, patience: float) -> GroupWriter:
        return GroupWriter(self.database, patience)

    async def close(self) -> None:
        """Finish what waits, then close. A closed storage may be opened again."""
        writer, self._writer, self._lease = self._writer, None, ""
        await self._close_readers()
        if writer is not None:
            await writer.close()  # SQLite's last connection folds the WAL into the file

    async def _close_readers(self) -> None:
        readers, self._readers = self._readers, None
        if readers is not None:
            await asyncio.to_thread(readers.shutdown)
            await asyncio.to_thread(self.database.close_readers)

    # ------------------------------------------------------------------ records

    async def append(self, record: Record) -> Record:
        began = time.perf_counter()
        encoded = await asyncio.to_thread(encode, record) if _size(record) > _LARGE else encode(record)
        with span("append", kind=encoded.kind, record_id=record.record_id):
            sequence, created_at = await self._write(self._appending(encoded), _APPENDS[encoded.kind])
        APPEND_SECONDS.observe(time.perf_counter() - began)
        APPENDED_BYTES.inc(len(encoded.payload))
        stored = encoded.record
        stored.sequence, stored.created_at = sequence, created_at
        return stored

    @abstractmethod
    def _appending(self, encoded: Encoded) -> Callable[[Connection], tuple[int, float]]:
        """The operation that stores the record, or finds the equal one: its sequence and time."""

    async def get(self, scenario: str, record_ids: Sequence[str]) -> dict[str, Record]:
        return await self._read(lambda connection: rows.get(connection, scenario, record_ids))

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
            lambda connection: rows.page(connection, scenario, kinds, after, earliest, latest, max(limit, 0))
        )

    async def pending_reports(self, scenario: str, after: int, limit: int) -> list[ReportRecord]:
        return await self._read(lambda connection: rows.pending_reports(connection, scenario, after, limit))

    async def consumed(self, scenario: str, record_ids: Sequence[str]) -> dict[str, Disposition]:
        return await self._read(lambda connection: rows.consumed(connection, scenario, record_ids))

    async def counts(self, scenario: str) -> dict[str, int]:
        return await self._read(lambda connection: rows.counts(connection, scenario))

    # ------------------------------------------------------------------ the chain

    async def create_scenario(self, base: Release) -> ScenarioState:
        return await self._write(lambda connection: chain.create_scenario(connection, base), Point.CREATE_SCENARIO)

    async def scenario(self, scenario: str) -> ScenarioState | None:
        return await self._read(lambda connection: chain.read_scenario(connection, scenario))

    async def scenarios(self) -> list[ScenarioState]:
        return await self._read(chain.read_scenarios)

    async def commit(self, commit: Commit) -> Commit:
        point = Point.WRITE_OFF if commit.release is None else Point.COMMIT
        lease, clock = self._lease, self.database.clock
        return await self._write(lambda connection: chain.apply_commit(connection, commit, lease, clock), point)

    async def commit_by_job(self, job_id: str) -> Commit | None:
        return await self._read(lambda connection: chain.read_commit_by_job(connection, job_id))

    async def commits(self, scenario: str, limit: int = 100) -> list[Commit]:
        return await self._read(lambda connection: chain.read_commits(connection, scenario, limit))

    async def releases(self, scenario: str, limit: int = 100) -> list[Release]:
        return await self._read(lambda connection: chain.read_releases(connection, scenario, limit))

    async def release(self, scenario: str, release_id: str) -> Release | None:
        return await self._read(lambda connection: chain.read_release(connection, scenario, release_id))

    async def next_load_sequence(self) -> int:
        return await self._write(rows.next_load, Point.LOAD_SEQUENCE)

    # ------------------------------------------------------------------ upkeep

    async def check(self) -> None:
        """Write 32 KiB, so that the last free page of a full disk does not pass for health."""
        filler = os.urandom(32 * 1024)
        await self._write(lambda connection: connection.execute("UPDATE probe SET filler = ?", (filler,)) and None)

    async def take_lease(self, holder: str, seconds: float) -> bool:
        held, clock = self._lease, self.database.clock
        taken = await self._write(lambda connection: chain.take_lease(connection, holder, seconds, clock, held))
        if taken is not None:
            self._lease = taken
        return taken is not None

    async def end_lease(self) -> None:
        held, self._lease = self._lease, ""
        if held:
            await self._write(lambda connection: chain.end_lease(connection, held))

    async def lease_holder(self) -> str | None:
        return await self._read(lambda connection: chain.read_lease(connection, self.database.clock))

    async def purge(self, retention: Retention, limit: int) -> PurgeResult:
        more = False
        if (before := retention.unreported_before) is not None:
            known, newest = await self._read(lambda connection: rows.quoted(connection, 0))
            lease, clock = self._lease, self.database.clock
            more = await self._write(
                lambda connection: rows.write_off_unreported(
                    connection, before, limit, known, newest, lease, clock
                ),
                Point.WRITE_OFF,
            )  # fmt: skip
        result = await self._write(lambda connection: rows.purge(connection, retention, limit))
        return PurgeResult(records=result.records, bytes=result.bytes, more=more or result.more)

    async def _write(self, operation: Callable[[Connection], T], point: Point | None = None) -> T:
        if self._writer is None:
            raise StorageError(f"{self.database.name} is not open" + (" for writing" if self._read_only else ""))
        return await self._writer.submit(operation, point)

    async def _read(self, query: Callable[[Connection], T]) -> T:
        if self._readers is None:
            raise StorageError(f"{self.database.name} is not open")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self.database.read, query)


def _size(record: Record) -> int:
    """Roughly, in bytes."""
    if not isinstance(record, InferenceRecord):
        return 0
    tokens = sum(len(generation.prompt_ids) + len(generation.output_ids) for generation in record.generations)
    return len(record.request) + len(record.response) + 4 * tokens
