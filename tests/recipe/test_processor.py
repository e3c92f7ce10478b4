from __future__ import annotations

import pytest

from reef.errors import ConfigError
from reef.recipe import RecipeConfig
from reef.recipe.processor import ScoredProcessor
from reef.runtime.interfaces import Batch, Disposition
from tests.recipe.exchanges import Desk, record, report

NOW = 1000.0
NO_BASELINE = {"mean": 0.0, "variance": 0.0, "weight": 0.0}


def desk(state: dict | None = None, **settings) -> Desk:
    return Desk(RecipeConfig(**{"batch_size": 2, "group_wait": 60.0, **settings}), state)


def dispositions(batch: Batch) -> dict[str, Disposition]:
    return {consumption.record_id: consumption.disposition for consumption in batch.consumed}


def advantages(batch: Batch) -> dict[str, float]:
    assert all(len(set(sample.advantages)) == 1 for sample in batch.samples)
    return {sample.record_id: sample.advantages[0] for sample in batch.samples}


# ---------------------------------------------------------------------------------------------- singles


def test_singles_train_against_their_own_mean_first() -> None:
    it = desk()
    assert it.scored("a", 1.0) == []
    assert not it.processor.ready(NOW)
    it.scored("b", 0.0)
    assert it.processor.ready(NOW)
    batch = it.processor.build(NOW)
    assert advantages(batch) == {"a": 0.5, "b": -0.5}
    assert dispositions(batch) == dict.fromkeys(("a", "report-a", "b", "report-b"), Disposition.TRAINED)
    assert batch.metrics["mean_score"] == 0.5
    assert batch.signal


def test_sample_is_the_recorded_generation() -> None:
    it = desk(batch_size=1, state={"baseline": {"mean": 0.5, "variance": 0.0, "weight": 1.0}})
    it.scored("a", 1.0)
    [sample] = it.processor.build(NOW).samples
    exact = it.records["a"].generations[0]
    assert (sample.prompt_ids, sample.output_ids, sample.logprobs) == (
        exact.prompt_ids,
        exact.output_ids,
        exact.logprobs,
    )
    assert sample.advantages == [0.5, 0.5, 0.5]


def test_baseline_moves_only_when_the_batch_is_acknowledged() -> None:
    it = desk(batch_size=1, baseline_decay=0.5)
    it.scored("a", 1.0)
    assert it.processor.state() == {"baseline": NO_BASELINE}
    batch = it.processor.build(NOW)
    coming = {"baseline": {"mean": 1.0, "variance": 0.0, "weight": 0.5}}
    assert it.processor.state() == coming  # of the step being built
    it.processor.acknowledge(batch)
    assert it.processor.state() == coming
    it.scored("b", 0.0)
    assert advantages(it.processor.build(NOW)) == {"b": -1.0}


def test_a_batch_that_dies_leaves_the_baseline_alone() -> None:
    it = desk(batch_size=1, baseline_decay=0.5)
    it.scored("a", 1.0)
    it.processor.build(NOW)
    restarted = desk(batch_size=1, baseline_decay=0.5)
    restarted.scored("a", 1.0)
    assert restarted.processor.build(NOW) == it.processor.build(NOW)


def test_build_is_repeatable_until_acknowledged() -> None:
    it = desk()
    it.scored("a", 1.0)
    it.scored("b", 0.0)
    first = it.processor.build(NOW)
    it.scored("c", 1.0)
    it.scored("d", 0.0)
    assert it.processor.build(NOW + 999) is first
    it.processor.acknowledge(first)
    assert set(advantages(it.processor.build(NOW))) == {"c", "d"}


def test_acknowledging_twice_is_harmless() -> None:
    it = desk(batch_size=1, baseline_decay=0.5)
    it.scored("a", 1.0)
    batch = it.processor.build(NOW)
    it.processor.acknowledge(batch)
    state = it.processor.state()
    it.processor.acknowledge(batch)
    assert it.processor.state() == state
    assert it.processor.counts()["pending"] == 0


def test_rejected_dispositions_acknowledge_the_batch_too() -> None:
    it = desk(batch_size=1)
    it.scored("a", 1.0)
    batch = it.processor.build(NOW)
    for_commit = Batch(
        samples=batch.samples,
        consumed=[type(c)(c.record_id, Disposition.REJECTED, c.reason) for c in batch.consumed],
        metrics={},
    )
    it.processor.acknowledge(for_commit)
    assert it.processor.state()["baseline"]["mean"] == 1.0
    assert not it.processor.ready(NOW)


def test_batch_of_a_process_before_is_forgotten_too() -> None:
    """After a crash the interrupted job commits what its own batch consumed, while the reports wait here again."""
    before, after = desk(batch_size=1), desk(batch_size=1)
    for it in (before, after):
        it.scored("a", 1.0)
    after.scored("b", 0.0)
    after.processor.acknowledge(before.processor.build(NOW))
    assert [one.record_id for one in after.processor.build(NOW).consumed] == ["report-b", "b"]
    assert after.report("again", "a", score=1.0)[0].reason == "already consumed: a (no_signal)"


def test_oldest_reports_go_first_whatever_the_order_of_arrival() -> None:
    processor = ScoredProcessor(RecipeConfig(batch_size=2), {})
    for sequence, name in ((3, "c"), (1, "a"), (2, "b")):
        processor.ingest(report(f"report-{name}", name, score=float(sequence), sequence=sequence), {name: record(name)})
    assert [sample.record_id for sample in processor.build(NOW).samples] == ["a", "b"]


def test_score_equal_to_the_baseline_is_no_signal() -> None:
    it = desk(batch_size=1, state={"baseline": {"mean": 0.5, "variance": 0.0, "weight": 1.0}})
    it.scored("a", 0.5)
    batch = it.processor.build(NOW)
    assert (batch.samples, batch.signal) == ([], False)
    assert dispositions(batch) == {"report-a": Disposition.NO_SIGNAL, "a": Disposition.NO_SIGNAL}
    assert "no signal" in batch.consumed[0].reason


def test_nothing_to_build_is_an_empty_batch_that_is_not_kept() -> None:
    it = desk()
    empty = it.processor.build(NOW)
    assert (empty.samples, empty.consumed, empty.signal) == ([], [], False)
    it.processor.acknowledge(empty)
    it.scored("a", 1.0)
    it.scored("b", 0.0)
    assert len(it.processor.build(NOW).samples) == 2


def test_normalized_singles() -> None:
    it = desk(normalize=True)
    it.scored("a", 4.0)
    it.scored("b", 0.0)
    assert advantages(it.processor.build(NOW)) == {"a": 1.0, "b": -1.0}


def test_scores_are_clipped() -> None:
    it = desk(score_min=0.0, score_max=1.0)
    it.scored("a", 7.0)
    it.scored("b", -3.0)
    assert advantages(it.processor.build(NOW)) == {"a": 0.5, "b": -0.5}


def test_foreign_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="algorithm state"):
        desk(state={"baseline": {"mean": "much"}})


# ---------------------------------------------------------------------------------------------- groups


def test_group_waits_for_its_size_and_stays_together() -> None:
    it = desk()
    for index in range(3):
        it.scored(f"g{index}", float(index), group="g", group_size=4)
    assert not it.processor.ready(0.0)
    assert it.processor.counts()["waiting_for_group"] == 3
    it.scored("g3", 3.0, group="g", group_size=4)
    assert it.processor.ready(0.0)
    assert advantages(it.processor.build(0.0)) == {"g0": -1.5, "g1": -0.5, "g2": 0.5, "g3": 1.5}


def test_leave_one_out_is_configurable() -> None:
    it = desk(advantage="leave-one-out")
    it.scored("a", 1.0, group="g", group_size=2)
    it.scored("b", 0.0, group="g", group_size=2)
    assert advantages(it.processor.build(0.0)) == {"a": 1.0, "b": -1.0}


def test_sized_group_trains_with_what_it_has_after_its_last_report() -> None:
    it = desk()
    it.scored("a", 1.0, group="g", group_size=8, at=0.0)
    it.scored("b", 0.0, group="g", group_size=8, at=50.0)
    assert not it.processor.ready(109.0)
    assert it.processor.ready(110.0)
    assert advantages(it.processor.build(110.0)) == {"a": 0.5, "b": -0.5}


def test_group_without_a_size_waits_from_its_first_report() -> None:
    it = desk()
    it.scored("a", 1.0, group="g", at=0.0)
    it.scored("b", 0.0, group="g", at=59.0)
    assert not it.processor.ready(59.9)
    assert it.processor.ready(60.0)


def test_group_of_one_falls_to_the_running_baseline() -> None:
    it = desk(batch_size=1, state={"baseline": {"mean": 0.25, "variance": 0.0, "weight": 1.0}})
    it.scored("a", 1.0, group="g", group_size=4)
    assert it.processor.build(59.0).samples == []
    assert advantages(it.processor.build(60.0)) == {"a": 0.75}


def test_batch_size_is_reached_by_whole_groups() -> None:
    it = desk(batch_size=3)
    for group in ("g", "h", "i"):
        it.scored(f"{group}0", 0.0, group=group, group_size=2)
        it.scored(f"{group}1", 1.0, group=group, group_size=2)
    assert set(advantages(it.processor.build(0.0))) == {"g0", "g1", "h0", "h1"}


def test_equal_group_is_dropped_while_others_train() -> None:
    it = desk(batch_size=2)
    for name, group, score in (("a", "g", 1.0), ("b", "g", 1.0), ("c", "h", 1.0), ("d", "h", 0.0)):
        it.scored(name, score, group=group, group_size=2)
    batch = it.processor.build(0.0)
    assert advantages(batch) == {"c": 0.5, "d": -0.5}
    assert dispositions(batch) == {
        **dict.fromkeys(("a", "report-a", "b", "report-b"), Disposition.NO_SIGNAL),
        **dict.fromkeys(("c", "report-c", "d", "report-d"), Disposition.TRAINED),
    }
    assert batch.signal
    assert batch.metrics["no_signal_samples"] == 2.0


def test_only_equal_groups_are_a_batch_without_signal() -> None:
    it = desk()
    it.scored("a", 1.0, group="g", group_size=2)
    it.scored("b", 1.0, group="g", group_size=2)
    assert it.processor.ready(0.0)
    batch = it.processor.build(0.0)
    assert not batch.signal
    assert set(dispositions(batch).values()) == {Disposition.NO_SIGNAL}


def test_late_member_does_not_join_a_batch_that_is_built() -> None:
    it = desk()
    it.scored("a", 1.0, group="g", group_size=2)
    it.scored("b", 0.0, group="g", group_size=2)
    batch = it.processor.build(0.0)
    it.scored("c", 0.0, group="g", group_size=2)
    assert it.processor.build(0.0) is batch
    it.processor.acknowledge(batch)
    assert it.processor.counts()["waiting_for_group"] == 1


def test_group_does_not_wait_for_a_member_whose_grader_failed() -> None:
    it = desk()
    it.scored("a", 1.0, group="g", group_size=3)
    it.scored("b", 0.0, group="g", group_size=3)
    it.exchange(record("c"))
    [consumed] = it.report("broken", "c", error="timeout", group="g", group_size=3)
    assert (consumed.disposition, consumed.reason) == (Disposition.INELIGIBLE, "timeout")
    assert it.processor.counts()["refused.grader_error"] == 1
    assert set(advantages(it.processor.build(0.0))) == {"a", "b"}


def test_second_try_of_a_grader_is_the_same_member() -> None:
    it = desk()
    it.scored("a", 1.0, group="g", group_size=3)
    it.exchange(record("b"))
    it.report("broken", "b", error="timeout", group="g", group_size=3)
    it.report("broken-again", "b", error="timeout", group="g", group_size=3)
    it.report("good", "b", score=0.0, group="g", group_size=3)
    assert not it.processor.ready(0.0)
    it.scored("c", 0.5, group="g", group_size=3)
    assert set(advantages(it.processor.build(0.0))) == {"a", "b", "c"}


def test_episode_counts_once_in_its_group_and_trains_every_turn() -> None:
    it = desk()
    it.exchange(record("turn1"), record("turn2"), record("turn3"))
    it.report("episode", "turn1", "turn2", "turn3", score=1.0, group="g", group_size=2)
    it.scored("short", 0.0, group="g", group_size=2)
    assert advantages(it.processor.build(0.0)) == {"turn1": 0.5, "turn2": 0.5, "turn3": 0.5, "short": -0.5}


def test_failed_groups_do_not_pile_up() -> None:
    it = desk()
    for index in range(10):
        it.exchange(record(f"r{index}"))
        it.report(f"broken{index}", f"r{index}", error="timeout", group=f"g{index}", group_size=2)
    it.processor.expire(1, 59.0, {})
    assert len(it.processor._units) == 10
    it.processor.expire(1, 60.0, {})
    assert (len(it.processor._units), len(it.processor._open)) == (0, 0)


# ---------------------------------------------------------------------------------------------- time and staleness


def test_too_young_reports_wait() -> None:
    it = desk(min_age=10.0)
    it.scored("a", 1.0, at=100.0)
    it.scored("b", 0.0, at=105.0)
    assert not it.processor.ready(114.0)
    assert (it.processor.counts()["too_young"], it.processor.counts()["ready"]) == (1, 1)
    assert it.processor.ready(115.0)


def test_what_waits_does_not_wait_until_a_clock_that_jumped_far_back_is_there_again() -> None:
    it = desk(min_age=10.0, group_wait=60.0)
    it.scored("a", 1.0, at=1e9)
    it.scored("b", 0.0, at=1e9, group="g")
    assert not it.processor.ready(1e9 - 5.0), "a small step back is waited for"
    assert it.processor.ready(1e9 - 86400.0)


def test_clock_that_jumped_back_does_not_stop_training() -> None:
    it = desk()
    it.scored("a", 1.0, at=1e9)
    it.scored("b", 0.0, at=1e9)
    assert it.processor.ready(5.0)


def test_staleness_is_counted_in_publications() -> None:
    it = desk(max_staleness=1)
    for name, release in (("old", "r0"), ("edge", "r1"), ("new", "r2")):
        it.exchange(record(name, release_id=release))
        it.report(f"report-{name}", name, score=1.0)
    written_off = it.processor.expire(3, NOW, {"r0": 0, "r1": 1, "r2": 2})
    assert {one.record_id: one.disposition for one in written_off} == {
        "old": Disposition.STALE,
        "report-old": Disposition.STALE,
    }
    assert written_off[0].reason == "too stale: 2 publications old, at most 1"
    assert it.processor.expire(3, NOW, {"r0": 0, "r1": 1, "r2": 2}) == []
    assert it.processor.counts()["pending"] == 2


def test_staleness_zero_takes_the_head_only_and_none_takes_all() -> None:
    strict, lax = desk(max_staleness=0), desk(max_staleness=None)
    for it in (strict, lax):
        it.scored("a", 1.0)
    assert strict.processor.expire(1, NOW, {"r0": 0}) == []
    assert len(strict.processor.expire(1, NOW, {"r0": 0, "r1": 1})) == 2
    assert lax.processor.expire(1, NOW, {"r0": 0, "r1": 1000}) == []


def test_release_that_the_chain_does_not_list_is_stale() -> None:
    it = desk()
    it.exchange(record("a", release_id="lost"), record("b", release_id=None))
    it.report("report-a", "a", score=1.0)
    it.report("report-b", "b", score=1.0)
    assert it.processor.expire(1, NOW, {}) == []
    assert len(it.processor.expire(1, NOW, {"r0": 0})) == 4


def test_stale_turn_leaves_the_rest_of_its_episode() -> None:
    it = desk(max_staleness=0, batch_size=1, state={"baseline": {"mean": 0.0, "variance": 0.0, "weight": 1.0}})
    it.exchange(record("old", release_id="r0"), record("new", release_id="r1"))
    it.report("episode", "old", "new", score=1.0)
    assert [one.record_id for one in it.processor.expire(1, NOW, {"r0": 0, "r1": 1})] == ["old"]
    batch = it.processor.build(NOW)
    assert dispositions(batch) == {"episode": Disposition.TRAINED, "new": Disposition.TRAINED}


def test_group_does_not_wait_for_its_stale_members() -> None:
    it = desk(max_staleness=0)
    it.exchange(record("old", release_id="r0"))
    it.report("report-old", "old", score=1.0, group="g", group_size=3)
    for name, score in (("a", 1.0), ("b", 0.0)):
        it.exchange(record(name, release_id="r1"))
        it.report(f"report-{name}", name, score=score, group="g", group_size=3)
    it.processor.expire(1, 0.0, {"r0": 0, "r1": 1})
    assert advantages(it.processor.build(0.0)) == {"a": 0.5, "b": -0.5}


def test_batch_being_built_does_not_expire() -> None:
    it = desk(max_staleness=0)
    it.scored("a", 1.0)
    it.scored("b", 0.0)
    batch = it.processor.build(NOW)
    assert it.processor.expire(1, NOW, {"r0": 0, "r9": 9}) == []
    assert it.processor.build(NOW) is batch


def test_counts_tell_what_waits_and_why() -> None:
    it = desk(min_age=5.0, batch_size=1)
    it.scored("a", 1.0, at=0.0)
    it.scored("b", 1.0, at=0.0, group="g")
    it.scored("c", 1.0, at=8.0)
    it.report("nothing", "a")
    assert not it.processor.ready(4.0)
    assert it.processor.ready(10.0)
    assert it.processor.counts() == {
        "pending": 3,
        "ready": 1,
        "too_young": 1,
        "waiting_for_group": 1,
        "ready_samples": 1,
        "in_batch": 0,
        "refused.no_score": 1,
    }
    it.processor.build(10.0)
    assert it.processor.counts()["in_batch"] == 1
