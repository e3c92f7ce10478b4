"""Scenarios, releases, commits and consumption as rows. Functions over an open transaction; none commits it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from reef.errors import Conflict, LeaseLost, NotFound
from reef.points import Point, crossing
from reef.records.sql import Connection, chunks, insert, marks, select_in
from reef.runtime.interfaces import Commit, Consumption, Disposition, Release, ReleaseKind, ScenarioState


def create_scenario(connection: Connection, base: Release) -> ScenarioState:
    """Create the scenario with its BASE release; an existing one is returned unchanged."""
    if base.kind is not ReleaseKind.BASE or base.number != 0 or base.parent_id is not None:
        raise ValueError(f"a scenario begins with a base release of number 0 and no parent, got {base}")
    existing = read_scenario(connection, base.scenario)
    if existing is not None:
        return existing
    connection.execute(
        "INSERT INTO scenarios VALUES (?, ?, ?, 0, '{}')", (base.scenario, base.created_at, base.release_id)
    )
    _insert_release(connection, base)
    return ScenarioState(scenario=base.scenario, created_at=base.created_at, head=base, step=0, algorithm_state={})


def read_scenario(connection: Connection, scenario: str) -> ScenarioState | None:
    row = connection.execute(
        "SELECT created_at, head, step, algorithm_state FROM scenarios WHERE scenario = ?", (scenario,)
    ).fetchone()
    if row is None:
        return None
    created_at, head_id, step, algorithm_state = row
    head = read_release(connection, scenario, head_id)
    assert head is not None
    return ScenarioState(
        scenario=scenario, created_at=created_at, head=head, step=step, algorithm_state=json.loads(algorithm_state)
    )


def read_scenarios(connection: Connection) -> list[ScenarioState]:
    """In order of creation."""
    rows = connection.execute(
        "SELECT s.scenario, s.created_at, s.step, s.algorithm_state, r.body FROM scenarios s "
        "JOIN releases r ON r.scenario = s.scenario AND r.release_id = s.head ORDER BY s.created_at, s.scenario"
    ).fetchall()
    return [
        ScenarioState(
            scenario=name, created_at=created_at, head=_release(body), step=step, algorithm_state=json.loads(state)
        )
        for name, created_at, step, state, body in rows
    ]


def read_release(connection: Connection, scenario: str, release_id: str) -> Release | None:
    row = connection.execute(
        "SELECT body FROM releases WHERE scenario = ? AND release_id = ?", (scenario, release_id)
    ).fetchone()
    return None if row is None else _release(row[0])


def read_releases(connection: Connection, scenario: str, limit: int) -> list[Release]:
    """Newest first."""
    rows = connection.execute(
        "SELECT body FROM releases WHERE scenario = ? ORDER BY number DESC LIMIT ?", (scenario, max(limit, 0))
    )
    return [_release(body) for (body,) in rows.fetchall()]


def apply_commit(connection: Connection, commit: Commit, lease: str, clock: str) -> Commit:
    """Move the head, consume, and keep state and metrics. The same commit again returns the first one.

    `lease` is what `take_lease` returned to the process that commits, or "".
    Raises NotFound (scenario, record), Conflict (head, id, job, consumed record), LeaseLost, ValueError (a release
    that does not continue the chain).
    """
    digest = _digest(commit)
    prior = connection.execute(
        "SELECT scenario, step, digest FROM commits WHERE commit_id = ?", (commit.commit_id,)
    ).fetchone()
    if prior is not None:
        if prior[2] != digest:
            raise Conflict(f"commit {commit.commit_id} exists with other content")
        return _read_commit(connection, prior[0], prior[1])
    _check_lease(connection, lease, clock)
    state = read_scenario(connection, commit.scenario)
    if state is None:
        raise NotFound(f"no scenario {commit.scenario}")
    _refuse_second_commit_of_job(connection, commit)
    _check_head(commit, state.head)
    stored = replace(commit, step=state.step + 1)
    connection.execute(
        "UPDATE scenarios SET step = ?, algorithm_state = ? WHERE scenario = ?",
        (
            stored.step,
            _json(state.algorithm_state if stored.algorithm_state is None else stored.algorithm_state),
            stored.scenario,
        ),
    )
    if stored.release is not None:
        with crossing(Point.HEAD):
            _move_head(connection, stored.release)
    connection.execute(
        "INSERT INTO commits VALUES (?, ?, ?, ?, ?, ?)",
        (stored.scenario, stored.step, stored.commit_id, stored.job_id, digest, _json(replace(stored, consumed=[]))),
    )
    with crossing(Point.CONSUMPTION):
        _consume(connection, stored)
    return stored


def _move_head(connection: Connection, release: Release) -> None:
    _insert_release(connection, release)
    connection.execute("UPDATE scenarios SET head = ? WHERE scenario = ?", (release.release_id, release.scenario))


def read_commit_by_job(connection: Connection, job_id: str) -> Commit | None:
    row = connection.execute("SELECT scenario, step FROM commits WHERE job_id = ?", (job_id,)).fetchone()
    return None if row is None else _read_commit(connection, *row)


def read_commits(connection: Connection, scenario: str, limit: int) -> list[Commit]:
    """Newest first."""
    rows = connection.execute(
        "SELECT step FROM commits WHERE scenario = ? ORDER BY step DESC LIMIT ?", (scenario, max(limit, 0))
    ).fetchall()
    return [_read_commit(connection, scenario, step) for (step,) in rows]


def count(connection: Connection, scenario: str, name: str, number: int = 1) -> None:
    add_counts(connection, {(scenario, name): number})


def add_counts(connection: Connection, numbers: Mapping[tuple[str, str], int]) -> None:
    """Add to maintained counts, by scenario and name."""
    connection.execute(
        f"INSERT INTO counts VALUES {', '.join(['(?, ?, ?)'] * len(numbers))} "
        "ON CONFLICT (scenario, name) DO UPDATE SET n = counts.n + excluded.n",
        [value for key, number in numbers.items() for value in (*key, number)],
    )


def take_lease(connection: Connection, holder: str, seconds: float, clock: str, held: str) -> str | None:
    """Take or renew the training lease for `seconds`; None while another holder's is alive.

    The returned text names one tenure: whoever takes over begins another one, and commits of the old one are refused.
    `held` is the caller's tenure so far, or "".
    """
    owner, epoch, left = connection.execute(f"SELECT holder, epoch, expires - {clock} FROM lease").fetchone()
    if owner != holder and left > 0:
        return None
    if held != _tenure(owner, epoch):
        epoch += 1
    connection.execute(f"UPDATE lease SET holder = ?, epoch = ?, expires = {clock} + ?", (holder, epoch, seconds))
    return _tenure(holder, epoch)


def end_lease(connection: Connection, held: str) -> None:
    """Give the lease back, if it is still that tenure."""
    owner, epoch = connection.execute("SELECT holder, epoch FROM lease").fetchone()
    if held == _tenure(owner, epoch):
        connection.execute("UPDATE lease SET expires = 0")


def read_lease(connection: Connection, clock: str) -> str | None:
    """The holder of a lease that is alive, or None."""
    row = connection.execute(f"SELECT holder FROM lease WHERE expires > {clock}").fetchone()
    return None if row is None else str(row[0])


def _tenure(holder: str, epoch: int) -> str:
    return f"{epoch}@{holder}"


def _check_lease(connection: Connection, held: str, clock: str) -> None:
    """Whose tenure has ended must not commit; nor may anybody while another one holds the lease."""
    owner, epoch, left = connection.execute(f"SELECT holder, epoch, expires - {clock} FROM lease").fetchone()
    if held != _tenure(owner, epoch) and (held or left > 0):
        raise LeaseLost(f"{owner} holds the training lease of this deployment: only it commits")


def _check_head(commit: Commit, head: Release) -> None:
    if commit.expected_head is not None and commit.expected_head != head.release_id:
        raise Conflict(f"the head of {commit.scenario} is {head.release_id}, not {commit.expected_head}")
    release = commit.release
    if release is None:
        return
    if commit.expected_head is None:
        raise ValueError("expected_head is required with a release")
    continues = (commit.scenario, head.release_id, head.number + 1)
    if (release.scenario, release.parent_id, release.number) != continues:
        raise ValueError(
            f"release {release.release_id} must have (scenario, parent_id, number) = {continues}, "
            f"got {(release.scenario, release.parent_id, release.number)}"
        )


def _refuse_second_commit_of_job(connection: Connection, commit: Commit) -> None:
    other = None if commit.job_id is None else read_commit_by_job(connection, commit.job_id)
    if other is not None:
        raise Conflict(f"job {commit.job_id} is committed already, by {other.commit_id}")


def _insert_release(connection: Connection, release: Release) -> None:
    if read_release(connection, release.scenario, release.release_id) is not None:
        raise Conflict(f"release {release.release_id} exists already")
    connection.execute(
        "INSERT INTO releases VALUES (?, ?, ?, ?)",
        (release.scenario, release.number, release.release_id, _json(release)),
    )


def _consume(connection: Connection, commit: Commit) -> None:
    """Writers run one after another, so what was looked up stays true until the end of the transaction."""
    ids = [consumption.record_id for consumption in commit.consumed]
    statement = "SELECT record_id, seq FROM records WHERE scenario = ? AND record_id IN ({})"
    found = select_in(connection, statement, [commit.scenario], ids)
    sequences: dict[str, int] = dict(found)
    spent = select_in(connection, "SELECT seq FROM consumption WHERE seq IN ({})", [], list(sequences.values()))
    taken = {sequence for (sequence,) in spent}
    rows = []
    for position, consumption in enumerate(commit.consumed):
        sequence = sequences.get(consumption.record_id)
        if sequence is None:
            raise NotFound(f"{commit.scenario} holds no record {consumption.record_id}")
        if sequence in taken:
            raise Conflict(f"record {consumption.record_id} is consumed already")
        taken.add(sequence)
        reason = consumption.reason.replace("\0", "\N{REPLACEMENT CHARACTER}")  # PostgreSQL's text has no NUL
        rows.append((sequence, commit.scenario, commit.step, position, str(consumption.disposition), reason))
    insert(connection, "INSERT INTO consumption (seq, scenario, step, position, disposition, reason)", rows)
    for some in chunks(list(sequences.values())):
        connection.execute(
            f"DELETE FROM pending WHERE scenario = ? AND seq IN ({marks(some)})", [commit.scenario, *some]
        )
    for disposition, number in Counter(str(consumption.disposition) for consumption in commit.consumed).items():
        count(connection, commit.scenario, f"consumed.{disposition}", number)


def _read_commit(connection: Connection, scenario: str, step: int) -> Commit:
    (body,) = connection.execute(
        "SELECT body FROM commits WHERE scenario = ? AND step = ?", (scenario, step)
    ).fetchone()
    rows = connection.execute(
        "SELECT r.record_id, c.disposition, c.reason FROM consumption c JOIN records r ON r.seq = c.seq "
        "WHERE c.scenario = ? AND c.step = ? ORDER BY c.position",
        (scenario, step),
    ).fetchall()
    commit = msgspec.convert(json.loads(body), Commit)
    commit.consumed = [Consumption(record_id, Disposition(name), reason) for record_id, name, reason in rows]
    return commit


def _release(body: str) -> Release:
    return msgspec.convert(json.loads(body), Release)


def _json(value: Any) -> str:
    """JSON that keeps what clients and Python's random states may hold: NaN, long integers, lone surrogates."""
    return json.dumps(msgspec.to_builtins(value), sort_keys=True, separators=(",", ":"))


def _digest(commit: Commit) -> bytes:
    """Over all but the step and the times, so that a retry after a restart is recognized."""
    release = None if commit.release is None else replace(commit.release, created_at=0.0)
    content = replace(commit, step=0, created_at=0.0, release=release)
    return hashlib.blake2b(_json(content).encode(), digest_size=16).digest()
