"""Bodies go, hashes stay, and nothing that may still train is touched. Every storage."""

from __future__ import annotations

import asyncio
import hashlib
import random
from dataclasses import replace

import pytest

from reef.errors import Conflict, LeaseLost
from reef.records import codec, retention
from reef.records.config import SqliteConfig
from reef.runtime.interfaces import CommitKind, Disposition, InstructionRecord, PurgeResult, Retention
from tests.records.values import base, discard, exchange, report, training

OLD = Retention(consumed_before=1e9)
UNREPORTED = Retention(unreported_before=150.0)  # exchanges are from 100.0, reports from 200.0


def words(name: str) -> str:
    """Text that does not compress to nothing."""
    rng = random.Random(name)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(600))


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@pytest.fixture
def head(storage, run):
    """Scenario `s`: exchanges a, b, c; reports ra, rb; a and ra are consumed."""
    state = run(storage.create_scenario(base()))
    for name in ("a", "b", "c"):
        run(storage.append(exchange(name, prompt=words(name))))
    run(storage.append(replace(report("ra", ["a"]), feedback=words("why"), metadata={"g": 1})))
    run(storage.append(report("rb", ["b"])))
    return run(storage.commit(training("c1", state.head, ["a", "ra"]))).release


def bodies(storage, run, *names):
    return {name: record for name, record in run(storage.get("s", names)).items() if not record.purged}


def test_consumed_records_lose_their_bodies_and_keep_the_hashes(storage, run, head):
    before = run(storage.get("s", ["a", "b", "c", "ra", "rb"]))
    result = run(storage.purge(OLD, 10))
    assert (result.records, result.more) == (2, False) and result.bytes > 0
    after = run(storage.get("s", ["a", "b", "c", "ra", "rb"]))
    a, ra = after["a"], after["ra"]
    assert {name: after[name] for name in ("b", "c", "rb")} == {name: before[name] for name in ("b", "c", "rb")}
    assert (a.request, a.response, a.generations) == (b"", b"", [])
    assert (a.route, a.status, a.release_id, a.tags) == ("/v1/chat/completions", 200, "release-0", before["a"].tags)
    assert a.purged["request"] == sha(before["a"].request) and a.purged["response"] == sha(before["a"].response)
    assert set(a.purged) == {"request", "response", "generations"}
    assert (ra.references, ra.score, ra.feedback, ra.metadata) == (["a"], 1.0, None, {})
    assert set(ra.purged) == {"feedback", "metadata"}
    assert (a.sequence, a.created_at) == (before["a"].sequence, before["a"].created_at)
    assert run(storage.purge(OLD, 10)) == PurgeResult(records=0, bytes=0, more=False)


def test_the_bytes_are_gone_and_counted(storage, run, head):
    def read(connection):
        [(stored,)] = connection.execute("SELECT sum(length(payload)) FROM records").fetchall()
        [(counted,)] = connection.execute("SELECT sum(n) FROM counts WHERE name = 'bytes'").fetchall()
        return int(stored), int(counted)

    before, counted = storage.database.read(read)
    assert before == counted
    freed = run(storage.purge(OLD, 10)).bytes
    assert storage.database.read(read) == (before - freed, counted - freed)


def test_what_was_purged_still_answers_everything_else(storage, run, head):
    original = exchange("a", prompt=words("a"))
    fates, counts, commits = run(storage.consumed("s", ["a"])), run(storage.counts("s")), run(storage.commits("s"))
    run(storage.purge(OLD, 10))
    assert run(storage.consumed("s", ["a"])) == fates == {"a": Disposition.TRAINED}
    assert (run(storage.counts("s")), run(storage.commits("s"))) == (counts, commits)
    assert [record.record_id for record in run(storage.page("s"))] == ["a", "b", "c", "ra", "rb"]
    assert run(storage.append(original)).sequence == run(storage.get("s", ["a"]))["a"].sequence  # a retry
    with pytest.raises(Conflict, match="a exists with other content"):
        run(storage.append(exchange("a", prompt="other")))
    with pytest.raises(Conflict, match="a is consumed"):
        run(storage.commit(discard("c2", ["a"])))


def test_age_spares_the_young(storage, run, head):
    assert run(storage.purge(Retention(consumed_before=150.0), 10)).records == 1  # a is from 100.0, ra from 200.0
    assert set(bodies(storage, run, "a", "ra")) == {"ra"}
    assert run(storage.purge(Retention(consumed_before=100.0), 10)).records == 0


def test_size_takes_the_oldest_consumed_until_it_fits(storage, run, head):
    async def fill():
        for first in range(0, 60, 20):
            names = [f"x{n:02}" for n in range(first, first + 20)]
            await asyncio.gather(*(storage.append(exchange(name, prompt=words(name))) for name in names))
            await storage.commit(discard(f"fill-{first}", names))

    run(fill())

    def size(connection):
        return int(connection.execute("SELECT sum(length(payload)) FROM records").fetchall()[0][0])

    limit = storage.database.read(size) - 5000
    result = run(retention.purge_all(storage, Retention(max_bytes=limit)))
    assert storage.database.read(size) <= limit and 0 < result.records < 62
    kept = run(storage.page("s", limit=1000))
    emptied = [record.sequence for record in kept if record.purged]
    consumed = [record.sequence for record in kept if record.record_id not in ("b", "c", "rb")]
    assert emptied == consumed[: len(emptied)]
    assert run(storage.purge(Retention(max_bytes=limit), 10)).records == 0


def test_batches_are_as_small_as_they_are_told_to_be(storage, run, head):
    first = run(storage.purge(OLD, 1))
    assert (first.records, first.more) == (1, True)
    total = run(retention.purge_all(storage, OLD))
    assert total.records == 1 and not bodies(storage, run, "a", "ra")


def test_unreported_answers_are_written_off_and_a_late_report_finds_them_stale(storage, run, head):
    run(storage.append(InstructionRecord(record_id="i", scenario="s", created_at=1.0, body={"goal": "x"})))
    total = run(retention.purge_all(storage, UNREPORTED))
    assert total.records == 2  # a, which was consumed before, and c; b is quoted by rb, ra is too young
    assert set(bodies(storage, run, "a", "b", "c", "ra", "rb")) == {"b", "ra", "rb"}
    assert run(storage.get("s", ["i"]))["i"].body == {"goal": "x"}
    assert run(storage.consumed("s", ["b", "c"])) == {"c": Disposition.STALE}
    written = run(storage.commits("s"))[0]
    assert (written.kind, written.step) == (CommitKind.DISCARDED, 2)
    assert [item.record_id for item in written.consumed] == ["c"]
    assert "retention-unreported-days" in written.consumed[0].reason
    late = run(storage.append(report("rc", ["c"])))
    assert run(storage.pending_reports("s", late.sequence - 1, 5)) == [late]
    assert run(storage.consumed("s", late.references)) == {"c": Disposition.STALE}
    assert run(storage.scenario("s")).head == head


def test_what_a_waiting_report_quotes_is_never_written_off(storage, run, head):
    """Not even once others before and after it are; and it is, once its report is consumed without it."""

    async def many():
        await asyncio.gather(*(storage.append(exchange(f"x{n:03}")) for n in range(250)))
        await storage.append(report("rx", ["x100", "x101"]))
        return await retention.purge_all(storage, UNREPORTED)

    assert run(many()).records == 1 + 1 + 248
    assert set(run(storage.consumed("s", [f"x{n:03}" for n in range(250)]))) == {
        f"x{n:03}" for n in range(250) if n not in (100, 101)
    }
    run(storage.commit(discard("c9", ["rx"])))
    assert run(retention.purge_all(storage, UNREPORTED)).records == 2
    assert set(run(storage.consumed("s", ["x100", "x101", "b"]))) == {"x100", "x101"}


def test_a_report_that_comes_between_looking_and_writing_saves_its_answer(storage, run, head, monkeypatch):
    from reef.records import rows

    quoted = rows.quoted
    calls = []

    def late(connection, after):
        found = quoted(connection, after)
        if not calls:
            calls.append(after)
            asyncio.run_coroutine_threadsafe(storage.append(report("rc", ["c"])), loop).result(30)
        return found

    monkeypatch.setattr(rows, "quoted", late)

    async def purge():
        nonlocal loop
        loop = asyncio.get_running_loop()
        return await storage.purge(UNREPORTED, 10)

    loop = None
    run(purge())
    assert run(storage.consumed("s", ["c"])) == {} and set(bodies(storage, run, "c")) == {"c"}


def test_only_the_process_that_trains_writes_off(storage, make_storage, run, head):
    other = make_storage()
    run(other.open())
    assert run(other.take_lease("other", 60.0))
    with pytest.raises(LeaseLost):
        run(storage.purge(UNREPORTED, 10))
    assert run(storage.purge(OLD, 10)).records == 2  # what is consumed already is anybody's to empty
    run(other.close())


def test_damage_to_what_is_left_is_noticed(storage, run, head):
    from reef.errors import StorageError

    payload = codec.emptied(run(storage.get("s", ["b"]))["b"])
    damaged = bytearray(payload)
    damaged[5] ^= 1
    for body in (bytes(damaged), payload[:10], payload[:-3]):
        with pytest.raises(StorageError, match="record b is damaged"):
            codec.decode("inference", record_id="b", scenario="s", created_at=1.0, sequence=1, digest=b"", payload=body)


def test_the_configuration_becomes_times_and_bytes():
    assert retention.retention_of(SqliteConfig(), 1e9) is None
    config = SqliteConfig(retention_days=2.0, retention_gib=0.5, retention_unreported_days=7.0)
    found = retention.retention_of(config, 1e9)
    assert found == Retention(1e9 - 2 * 86_400, 2**29, 1e9 - 7 * 86_400)


def test_the_loop_purges_only_when_it_is_this_process_turn(storage, run, head, monkeypatch):
    monkeypatch.setattr(retention, "ROUND_SECONDS", 0.01)
    turns = iter([False, False])
    rounds = []

    def mine() -> bool:
        rounds.append(len(bodies_now()))
        return next(turns, True)

    def bodies_now():
        return storage.database.read(
            lambda connection: connection.execute("SELECT seq FROM consumption WHERE purged = 0").fetchall()
        )

    async def loop():
        task = asyncio.ensure_future(
            retention.keep_purging(storage, SqliteConfig(retention_days=1.0), lambda: 1e9, mine)
        )
        while len(rounds) < 5:
            await asyncio.sleep(0.01)
        task.cancel()

    run(loop())
    assert rounds[:3] == [2, 2, 2] and rounds[-1] == 0
