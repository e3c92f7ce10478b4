"""Records as rows. Functions over an open transaction; none commits it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from reef.errors import Conflict
from reef.records import chain
from reef.records.codec import Encoded, decode, emptied
from reef.records.sql import Connection, chunks, marks, select_in
from reef.runtime.interfaces import (
    Commit,
    CommitKind,
    Consumption,
    Disposition,
    PurgeResult,
    Record,
    RecordKind,
    ReportRecord,
    Retention,
)

BYTES = "bytes"  # the maintained count of what a scenario's records take, as stored
_COLUMNS = "r.kind, r.record_id, r.scenario, r.created_at, r.seq, r.digest, r.payload"


def already_stored(row: tuple[int, float, bytes], encoded: Encoded) -> tuple[int, float]:
    """Sequence and time of the equal record that is there. Raises Conflict when it is another one."""
    sequence, created_at, digest = row
    if digest != encoded.digest:
        raise Conflict(f"record {encoded.record.record_id} exists with other content")
    return sequence, created_at


def get(connection: Connection, scenario: str, record_ids: Sequence[str]) -> dict[str, Record]:
    statement = f"SELECT {_COLUMNS} FROM records r WHERE r.scenario = ? AND r.record_id IN ({{}})"
    return {row[1]: _decode(row) for row in select_in(connection, statement, [scenario], record_ids)}


def page(
    connection: Connection,
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
            (scenario, str(kind), after, earliest, latest, limit),
        )
        sequences += [sequence for (sequence,) in rows.fetchall()]
    wanted = sorted(sequences)[:limit]
    found = select_in(connection, f"SELECT {_COLUMNS} FROM records r WHERE r.seq IN ({{}}) ORDER BY r.seq", [], wanted)
    return [_decode(row) for row in found]


def pending_reports(connection: Connection, scenario: str, after: int, limit: int) -> list[ReportRecord]:
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM pending p JOIN records r ON r.seq = p.seq "
        "WHERE p.scenario = ? AND p.seq > ? ORDER BY p.seq LIMIT ?",
        (scenario, after, max(limit, 0)),
    ).fetchall()
    return [record for row in rows if isinstance(record := _decode(row), ReportRecord)]


def consumed(connection: Connection, scenario: str, record_ids: Sequence[str]) -> dict[str, Disposition]:
    statement = (
        "SELECT r.record_id, c.disposition FROM records r JOIN consumption c ON c.seq = r.seq "
        "WHERE r.scenario = ? AND r.record_id IN ({})"
    )
    found = select_in(connection, statement, [scenario], record_ids)
    return {record_id: Disposition(disposition) for record_id, disposition in found}


def counts(connection: Connection, scenario: str) -> dict[str, int]:
    """Every name is there, zero or not."""
    names = [*RecordKind, *(f"consumed.{disposition}" for disposition in Disposition)]
    stored = dict(connection.execute("SELECT name, n FROM counts WHERE scenario = ?", (scenario,)).fetchall())
    return {str(name): stored.get(str(name), 0) for name in names}


def next_load(connection: Connection) -> int:
    connection.execute("UPDATE sequences SET n = n + 1 WHERE name = 'load'")
    value: int = connection.execute("SELECT n FROM sequences WHERE name = 'load'").fetchone()[0]
    return value


# ---------------------------------------------------------------------------------------------- retention


def quoted(connection: Connection, after: int) -> tuple[dict[str, set[str]], int]:
    """By scenario, the answers that waiting reports quote, and the newest of those reports (sequence > `after`)."""
    names: dict[str, set[str]] = {}
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM pending p JOIN records r ON r.seq = p.seq WHERE p.seq > ? ORDER BY p.seq", (after,)
    ).fetchall()
    for report in map(_decode, rows):
        if isinstance(report, ReportRecord):
            names.setdefault(report.scenario, set()).update(report.references)
    return names, rows[-1][4] if rows else after


def purge(connection: Connection, retention: Retention, limit: int) -> PurgeResult:
    """Empty the oldest consumed records that `retention` no longer keeps, at most `limit`."""
    limits = (retention.consumed_before, retention.unreported_before)
    before = max((limit for limit in limits if limit is not None), default=None)
    excess = _excess(connection, retention.max_bytes)
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM consumption c JOIN records r ON r.seq = c.seq WHERE c.purged = 0 "
        "ORDER BY c.seq LIMIT ?",
        (limit,),
    ).fetchall()
    done, freed = [], 0
    for row in rows:
        too_old, too_many = before is not None and row[3] < before, freed < excess and excess > 0
        if not too_old and not too_many:
            continue
        done.append(row[4])
        freed += _empty(connection, row)
    for some in chunks(done):
        connection.execute(f"UPDATE consumption SET purged = 1 WHERE seq IN ({marks(some)})", some)
    return PurgeResult(records=len(done), bytes=freed, more=bool(done) and len(rows) == limit)


def write_off_unreported(
    connection: Connection, before: float, limit: int, known: dict[str, set[str]], newest: int, lease: str, clock: str
) -> bool:
    """Consume old answers that nobody reported on and no waiting report quotes; True if there may be more.

    `known` and `newest` are of `quoted`, some moments ago. A report that comes later finds its answer consumed.
    """
    later, _ = quoted(connection, newest)
    more = False
    for (scenario,) in connection.execute("SELECT scenario FROM scenarios ORDER BY scenario").fetchall():
        keep = known.get(scenario, set()) | later.get(scenario, set())
        rows = _unconsumed_answers(connection, scenario, before, limit + len(keep))
        old = [name for _, name in rows if name not in keep][:limit]
        if old:
            chain.apply_commit(connection, _write_off(scenario, old), lease, clock)
            _raise_floor(connection, scenario, [sequence for sequence, name in rows if name not in old], rows[-1][0])
        more = more or len(old) == limit
    return more


def _unconsumed_answers(connection: Connection, scenario: str, before: float, limit: int) -> list[tuple[int, str]]:
    """Oldest first. Below the floor there is none, so that consumed ones are not passed over again and again."""
    rows: list[tuple[int, str]] = connection.execute(
        "SELECT r.seq, r.record_id FROM records r LEFT JOIN consumption c ON c.seq = r.seq "
        "LEFT JOIN sequences f ON f.name = ? WHERE r.scenario = ? AND r.kind = ? AND r.seq > coalesce(f.n, 0) "
        "AND r.created_at < ? AND c.seq IS NULL ORDER BY r.seq LIMIT ?",
        (f"floor {scenario}", scenario, str(RecordKind.INFERENCE), before, limit),
    ).fetchall()
    return rows


def _raise_floor(connection: Connection, scenario: str, left: list[int], last: int) -> None:
    floor = min(left) - 1 if left else last
    connection.execute(
        "INSERT INTO sequences VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET n = excluded.n",
        (f"floor {scenario}", floor),
    )


def _write_off(scenario: str, record_ids: Sequence[str]) -> Commit:
    reason = "nobody reported on it in time (storage.retention-unreported-days)"
    return Commit(
        commit_id=f"retention_{uuid.uuid4().hex}",
        scenario=scenario,
        kind=CommitKind.DISCARDED,
        created_at=time.time(),
        consumed=[Consumption(name, Disposition.STALE, reason) for name in record_ids],
        metrics={"reasons": {f"{Disposition.STALE}: {reason}": len(record_ids)}},
    )


def _excess(connection: Connection, max_bytes: int | None) -> int:
    """By how many bytes the records are over the limit."""
    if max_bytes is None:
        return 0
    (total,) = connection.execute("SELECT coalesce(sum(n), 0) FROM counts WHERE name = ?", (BYTES,)).fetchone()
    return max(0, int(total) - max_bytes)


def _empty(connection: Connection, row: tuple[Any, ...]) -> int:
    """Put hashes in the place of bodies; return the bytes saved."""
    record = _decode(row)
    payload = emptied(record)
    if payload is None:
        return 0
    connection.execute("UPDATE records SET payload = ? WHERE seq = ?", (payload, row[4]))
    saved = len(row[6]) - len(payload)
    chain.count(connection, record.scenario, BYTES, -saved)
    return saved


def _decode(row: tuple[Any, ...]) -> Record:
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
