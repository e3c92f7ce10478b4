"""What every storage does. Implementations are parameters of `make_storage` in conftest.py."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from reef.errors import Conflict, NotFound, StorageError
from reef.runtime.interfaces import (
    Commit,
    CommitKind,
    Consumption,
    Disposition,
    InferenceRecord,
    InstructionRecord,
    RecordKind,
    ReportRecord,
)
from tests.records.values import base, discard, exchange, following, report, training

# ---------------------------------------------------------------------------------------------- records


def test_append_returns_the_record_with_its_sequence(storage, run):
    first, second = run(storage.append(exchange("a"))), run(storage.append(exchange("b")))
    assert replace(first, sequence=0) == exchange("a")
    assert 0 < first.sequence < second.sequence


def test_every_kind_comes_back_exactly(storage, run):
    said = ReportRecord(
        record_id="r",
        scenario="s",
        created_at=1.5,
        references=["a"],
        feedback={"why": ["ü", "\ud800", 10**30, None], "nested": {"b": 1, "a": 0.1}},
        error="grader failed",
        metadata={"group": "g"},
    )
    told = InstructionRecord(record_id="i", scenario="s", created_at=1.0, body={"goal": "shorter"})
    for record in (exchange("a"), said, told):
        stored = run(storage.append(record))
        assert run(storage.get("s", [record.record_id])) == {record.record_id: stored}
        assert replace(stored, sequence=0) == record


def test_bodies_are_byte_exact(storage, run):
    record = replace(exchange("a"), request=bytes(range(256)), response=b"data: \xff\r\n\r\n\0")
    run(storage.append(record))
    found = run(storage.get("s", ["a"]))["a"]
    assert (found.request, found.response) == (record.request, record.response)


def test_same_id_and_content_is_stored_once(storage, run):
    first = run(storage.append(exchange("a")))
    again = run(storage.append(replace(exchange("a"), created_at=999.0)))  # a retry comes later
    assert again == first
    assert run(storage.counts("s"))["inference"] == 1


def test_same_id_with_other_content_conflicts(storage, run):
    stored = run(storage.append(exchange("a")))
    for other in (replace(exchange("a"), status=500), exchange("a", scenario="t"), report("a")):
        with pytest.raises(Conflict, match="a exists"):
            run(storage.append(other))
    assert run(storage.page("s")) == [stored]
    assert run(storage.page("t")) == []


def test_float32_rounding_is_part_of_the_content(storage, run):
    record = exchange("a")
    record.generations[0].logprobs = [-0.1, -0.2, -0.3]
    first = run(storage.append(record))
    assert first.generations[0].logprobs == pytest.approx([-0.1, -0.2, -0.3], abs=1e-7)
    assert run(storage.append(record)) == run(storage.append(first)) == first
    assert run(storage.get("s", ["a"])) == {"a": first}


def test_concurrent_appends_of_one_id_agree(storage, run):
    async def race():
        return await asyncio.gather(*(storage.append(exchange("a")) for _ in range(20)))

    assert len({record.sequence for record in run(race())}) == 1


def test_what_is_new_in_a_group_with_something_stored_is_counted_once(storage, run):
    async def at_once(*records):
        return await asyncio.gather(*map(storage.append, records))

    [first] = run(at_once(exchange("b")))
    said = [report(f"r{number}", "b") for number in range(150)]
    a, again, c, *reports = run(at_once(exchange("a"), exchange("b"), exchange("c"), *said))
    assert again == first and len({a.sequence, c.sequence, *(one.sequence for one in reports)}) == 152
    counts = run(storage.counts("s"))
    assert (counts["inference"], counts["report"]) == (3, 150)
    assert [one.record_id for one in run(storage.pending_reports("s", 0, 500))] == [one.record_id for one in said]
    assert [one.sequence for one in run(storage.pending_reports("s", 0, 500))] == [one.sequence for one in reports]


def test_a_conflict_does_not_touch_its_neighbours(storage, run):
    run(storage.append(exchange("taken")))

    async def together():
        records = [exchange("x"), replace(exchange("taken"), status=500), exchange("y")]
        return await asyncio.gather(*map(storage.append, records), return_exceptions=True)

    x, conflict, y = run(together())
    assert isinstance(conflict, Conflict)
    assert run(storage.page("s", after=1)) == [x, y]


def test_unusable_values_fail_alone_and_store_nothing(storage, run):
    bad = exchange("bad")
    bad.generations[0].prompt_ids = [-1]

    async def together():
        appends = map(storage.append, [exchange("x"), bad, exchange("\ud800"), exchange("y")])
        return await asyncio.gather(*appends, return_exceptions=True)

    outcomes = run(together())
    assert [type(outcome) for outcome in outcomes[::3]] == [InferenceRecord, InferenceRecord]
    assert all(isinstance(outcome, ValueError) for outcome in outcomes[1:3])
    assert [record.record_id for record in run(storage.page("s"))] == ["x", "y"]


def test_get_is_limited_to_the_scenario(storage, run):
    run(storage.append(exchange("a")))
    run(storage.append(exchange("b", scenario="t")))
    assert set(run(storage.get("s", ["a", "b", "missing"]))) == {"a"}


def test_page_walks_in_order_and_filters(storage, run):
    for number in range(10):
        run(storage.append(exchange(f"e{number}", created_at=float(number))))
        run(storage.append(replace(report(f"r{number}"), created_at=float(number))))
        run(storage.append(exchange(f"other{number}", scenario="t")))
    seen, after = [], 0
    while page := run(storage.page("s", after=after, limit=3)):
        assert len(page) <= 3
        seen += [record.record_id for record in page]
        after = page[-1].sequence
    assert seen == [f"{kind}{number}" for number in range(10) for kind in "er"]
    reports = run(storage.page("s", kind=RecordKind.REPORT, since=2.0, until=5.0))
    assert [record.record_id for record in reports] == ["r2", "r3", "r4"]
    assert run(storage.page("s", limit=0)) == []


def test_records_survive_reopening(storage, make_storage, run):
    stored = [run(storage.append(exchange("a"))), run(storage.append(report("r", ["a"])))]
    run(storage.close())
    reopened = make_storage()
    run(reopened.open())
    assert run(reopened.page("s")) == stored
    assert run(reopened.append(exchange("a"))) == stored[0]
    run(reopened.close())


def test_a_closed_storage_refuses_and_can_be_opened_again(storage, run):
    run(storage.close())
    with pytest.raises(StorageError, match="not open"):
        run(storage.append(exchange("a")))
    with pytest.raises(StorageError, match="not open"):
        run(storage.page("s"))
    run(storage.open())
    run(storage.append(exchange("a")))


def test_close_finishes_what_was_submitted(storage, make_storage, run):
    async def append_and_close():
        appends = [asyncio.ensure_future(storage.append(exchange(f"e{number}"))) for number in range(50)]
        await asyncio.sleep(0)  # let them be submitted
        await storage.close()
        return await asyncio.gather(*appends)

    stored = run(append_and_close())
    reopened = make_storage()
    run(reopened.open())
    assert run(reopened.page("s")) == stored
    run(reopened.close())


def test_a_cancelled_append_leaves_the_storage_working(storage, run):
    async def cancel():
        task = asyncio.ensure_future(storage.append(exchange("a")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await storage.append(exchange("b"))

    assert run(cancel()).sequence > 0


# ---------------------------------------------------------------------------------------------- the chain


def test_create_scenario_once(storage, run):
    created = run(storage.create_scenario(base()))
    assert (created.head, created.step, created.algorithm_state) == (base(), 0, {})
    assert run(storage.create_scenario(replace(base(), content_id="other"))) == created
    assert run(storage.scenario("s")) == created
    assert run(storage.scenario("unknown")) is None
    assert run(storage.releases("s")) == [base()]


def test_two_scenarios_may_name_their_releases_alike(storage, run):
    states = [run(storage.create_scenario(base(name))) for name in ("s", "t")]
    assert run(storage.scenarios()) == states
    assert run(storage.release("t", "release-0")) == base("t")


def test_a_chain_begins_with_a_base(storage, run):
    with pytest.raises(ValueError, match="base release"):
        run(storage.create_scenario(following(base(), "release-1")))
    assert run(storage.scenarios()) == []


@pytest.fixture
def head(storage, run):
    """Scenario `s` with exchanges a, b and reports ra, rb."""
    for name in ("a", "b"):
        run(storage.append(exchange(name)))
        run(storage.append(report(f"r{name}", [name])))
    return run(storage.create_scenario(base())).head


def test_commit_moves_everything_together(storage, run, head):
    commit = training("c1", head, ["a", "ra"])
    stored = run(storage.commit(commit))
    assert stored == replace(commit, step=1)
    state = run(storage.scenario("s"))
    assert (state.head, state.step, state.algorithm_state) == (commit.release, 1, commit.algorithm_state)
    assert run(storage.releases("s")) == [commit.release, head]
    assert run(storage.release("s", commit.release.release_id)) == commit.release
    assert run(storage.commits("s")) == [stored]
    assert run(storage.commit_by_job("job of c1")) == stored
    assert run(storage.commit_by_job("unknown")) is None
    assert run(storage.consumed("s", ["a", "b", "ra"])) == {"a": Disposition.TRAINED, "ra": Disposition.TRAINED}
    assert [record.record_id for record in run(storage.pending_reports("s", 0, 10))] == ["rb"]


def test_commit_may_be_retried(storage, run, head):
    stored = run(storage.commit(training("c1", head, ["a"])))
    later = training("c1", head, ["a"])
    later.created_at = later.release.created_at = 999.0
    assert run(storage.commit(later)) == stored
    assert run(storage.scenario("s")).step == 1
    assert run(storage.counts("s"))["consumed.trained"] == 1


def test_same_commit_id_with_other_content_conflicts(storage, run, head):
    run(storage.commit(training("c1", head, ["a"])))
    with pytest.raises(Conflict, match="c1"):
        run(storage.commit(training("c1", head, ["a", "b"])))
    assert run(storage.consumed("s", ["b"])) == {}


def test_a_job_commits_once(storage, run, head):
    first = run(storage.commit(training("c1", head, ["a"])))
    second = replace(training("c2", first.release, ["b"]), job_id=first.job_id)
    with pytest.raises(Conflict, match="job of c1"):
        run(storage.commit(second))


def test_head_moves_by_compare_and_swap(storage, run, head):
    first = run(storage.commit(training("c1", head, ["a"])))
    with pytest.raises(Conflict, match=r"release of c1.*not release-0"):
        run(storage.commit(training("c2", head, ["b"])))
    assert run(storage.scenario("s")).head == first.release
    assert run(storage.consumed("s", ["b"])) == {}
    assert run(storage.scenario("s")).step == 1


def test_one_of_many_racing_commits_wins(storage, run, head):
    async def race():
        commits = (storage.commit(training(f"c{number}", head, [])) for number in range(20))
        return await asyncio.gather(*commits, return_exceptions=True)

    outcomes = run(race())
    winners = [outcome for outcome in outcomes if isinstance(outcome, Commit)]
    assert len(winners) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 19
    assert run(storage.releases("s")) == [winners[0].release, head]


@pytest.mark.parametrize("wrong", [{"number": 2}, {"parent_id": "other"}, {"scenario": "t"}])
def test_a_release_continues_the_chain(storage, run, head, wrong):
    commit = training("c1", head, [])
    commit.release = replace(commit.release, **wrong)
    with pytest.raises(ValueError, match="must have"):
        run(storage.commit(commit))


def test_a_release_needs_an_expected_head(storage, run, head):
    with pytest.raises(ValueError, match="expected_head"):
        run(storage.commit(replace(training("c1", head, []), expected_head=None)))


def test_a_release_id_is_used_once(storage, run, head):
    commit = training("c1", head, [])
    commit.release.release_id = head.release_id
    with pytest.raises(Conflict, match="release-0"):
        run(storage.commit(commit))


def test_no_record_is_consumed_twice(storage, run, head):
    first = run(storage.commit(training("c1", head, ["a", "ra"])))
    with pytest.raises(Conflict, match="a is consumed"):
        run(storage.commit(training("c2", first.release, ["b", "a"])))
    with pytest.raises(Conflict, match="a is consumed"):
        run(storage.commit(discard("c3", ["a"])))
    with pytest.raises(Conflict, match="b is consumed"):
        run(storage.commit(discard("c4", ["b", "b"])))
    assert run(storage.consumed("s", ["a", "b"])) == {"a": Disposition.TRAINED}
    assert run(storage.scenario("s")).head == first.release


def test_only_own_records_are_consumed(storage, run, head):
    run(storage.append(exchange("foreign", scenario="t")))
    for record_id in ("foreign", "missing"):
        with pytest.raises(NotFound, match=record_id):
            run(storage.commit(discard("c1", ["a", record_id])))
    assert run(storage.consumed("s", ["a"])) == {}
    assert run(storage.commits("s")) == []


def test_a_commit_without_release_keeps_head_and_state(storage, run, head):
    first = run(storage.commit(training("c1", head, ["a"])))
    stored = run(storage.commit(discard("c2", ["b"])))
    state = run(storage.scenario("s"))
    assert (state.head, state.step, stored.step) == (first.release, 2, 2)
    assert state.algorithm_state == first.algorithm_state
    assert run(storage.commits("s", limit=1)) == [stored]


def test_a_stale_expected_head_stops_a_commit_without_release(storage, run, head):
    run(storage.commit(training("c1", head, ["a"])))
    with pytest.raises(Conflict):
        run(storage.commit(replace(discard("c2", ["b"]), expected_head=head.release_id)))


def test_commit_needs_its_scenario(storage, run):
    with pytest.raises(NotFound, match="no scenario s"):
        run(storage.commit(discard("c1", [])))


def test_commit_keeps_odd_json(storage, run, head):
    commit = Commit(
        commit_id="c1",
        scenario="s",
        kind=CommitKind.NO_SIGNAL,
        created_at=1.0,
        consumed=[Consumption("b", Disposition.NO_SIGNAL, "equal scores"), Consumption("a", Disposition.NO_SIGNAL)],
        algorithm_state={"random": 2**127, "best": float("-inf")},
        metrics={"names": ["ü", "\ud800"]},
    )
    run(storage.commit(commit))
    assert run(storage.commits("s")) == [replace(commit, step=1)]
    assert run(storage.scenario("s")).algorithm_state == commit.algorithm_state


def test_pending_reports_page_in_order(storage, run):
    run(storage.create_scenario(base()))
    sequences = [run(storage.append(report(f"r{number}"))).sequence for number in range(6)]
    run(storage.append(report("elsewhere", scenario="t")))
    run(storage.commit(discard("c1", ["r0", "r3"])))
    first = run(storage.pending_reports("s", 0, 2))
    assert [record.record_id for record in first] == ["r1", "r2"]
    rest = run(storage.pending_reports("s", first[-1].sequence, 10))
    assert [record.sequence for record in rest] == sequences[4:]


def test_counts(storage, run, head):
    run(storage.append(InstructionRecord(record_id="i", scenario="s", created_at=1.0, body={})))
    run(storage.commit(discard("c1", ["ra", "rb"])))
    counts = run(storage.counts("s"))
    assert counts["consumed.stale"] == 2
    assert (counts["inference"], counts["report"], counts["instruction"], counts["consumed.trained"]) == (2, 2, 1, 0)
    assert not any(run(storage.counts("unknown")).values())


def test_load_sequence_never_repeats(storage, make_storage, run):
    async def many():
        return await asyncio.gather(*(storage.next_load_sequence() for _ in range(10)))

    assert sorted(run(many())) == list(range(1, 11))
    run(storage.close())
    reopened = make_storage()
    run(reopened.open())
    assert run(reopened.next_load_sequence()) == 11
    run(reopened.close())


def test_two_storages_share_one_database(storage, make_storage, run):
    """As two processes do: one conflicts with what the other wrote."""
    other = make_storage()
    run(other.open())
    stored = run(storage.append(exchange("a")))
    assert run(other.append(exchange("a"))) == stored
    assert run(other.append(exchange("b"))).sequence > stored.sequence
    assert len(run(storage.page("s"))) == 2
    run(other.close())


def test_check(storage, run):
    run(storage.check())
    run(storage.close())
    with pytest.raises(StorageError):
        run(storage.check())


def test_nothing_blocks_the_event_loop(storage, run):
    blockbuster = pytest.importorskip("blockbuster")
    big = exchange("big", prompt="x" * 1_000_000)

    async def use():
        await asyncio.gather(storage.append(exchange("a")), storage.append(big), storage.create_scenario(base()))
        await asyncio.gather(storage.page("s"), storage.get("s", ["a"]), storage.scenarios(), storage.check())
        await storage.close()
        await storage.open()

    with blockbuster.blockbuster_ctx():
        run(use())
