from __future__ import annotations

import math

import pytest

from reef.recipe import RecipeConfig
from reef.runtime.interfaces import Disposition, Ending
from tests.recipe.exchanges import Desk, generation, record


def desk(**settings) -> Desk:
    return Desk(RecipeConfig(**{"batch_size": 1, **settings}), {"baseline": {"mean": 0.5, "variance": 0, "weight": 1}})


def broken_logprobs():
    answer = generation()
    answer.logprobs[1] = math.nan
    return answer


@pytest.mark.parametrize(
    ("written", "kind", "disposition", "reason"),
    [
        (record("r", generation(ending=Ending.CLIENT_LEFT)), "client_left", Disposition.INCOMPLETE, "client left"),
        (record("r", generation(ending=Ending.ENGINE_CUT), status=503), "engine_cut", Disposition.INCOMPLETE, "engine"),
        (record("r", captured=False), "no_generations", Disposition.INELIGIBLE, "provider traffic"),
        (record("r", status=400), "status", Disposition.INELIGIBLE, "status 400"),
        (record("r", generation(tokens=0)), "no_output", Disposition.INELIGIBLE, "no tokens"),
        (record("r", broken_logprobs()), "no_logprobs", Disposition.INELIGIBLE, "finite"),
    ],
)
def test_record_that_never_trains_is_consumed_with_its_report(written, kind, disposition, reason) -> None:
    it = desk()
    it.exchange(written)
    of_record, of_report = it.report("report", "r", score=1.0)
    assert (of_record.record_id, of_record.disposition) == ("r", disposition)
    assert (of_report.record_id, of_report.disposition) == ("report", disposition)
    assert reason in of_record.reason
    assert it.processor.counts()[f"refused.{kind}"] == 1
    assert not it.processor.ready(0.0)


def test_a_written_off_record_is_written_off_once() -> None:
    it = desk()
    it.exchange(record("r", generation(ending=Ending.CLIENT_LEFT)))
    assert len(it.report("first", "r", score=1.0)) == 2
    [second] = it.report("second", "r", score=1.0)
    assert (second.record_id, second.reason) == ("second", "already consumed: r (incomplete)")


def test_length_trains_unless_configured_otherwise() -> None:
    for allowed in (True, False):
        it = desk(train_on_length=allowed)
        it.exchange(record("r", generation(ending=Ending.LENGTH)))
        it.report("report", "r", score=1.0)
        assert it.processor.ready(0.0) is allowed
    assert it.processor.counts()["refused.stopped_by_length"] == 1


def test_report_without_a_score_leaves_its_record_to_others() -> None:
    it = desk()
    it.exchange(record("r"))
    [thoughts] = it.report("thoughts", "r")
    [failed] = it.report("failed", "r", error="judge timed out")
    assert (thoughts.record_id, thoughts.reason) == ("thoughts", "no score")
    assert (failed.record_id, failed.disposition) == ("failed", Disposition.INELIGIBLE)
    assert it.report("good", "r", score=1.0) == []
    assert it.processor.ready(0.0)


def test_unknown_reference_consumes_the_report_only() -> None:
    [consumed] = desk().report("report", "nowhere", score=1.0)
    assert (consumed.record_id, consumed.disposition) == ("report", Disposition.INELIGIBLE)
    assert consumed.reason == "unknown receipt nowhere"


def test_report_trains_with_those_of_its_records_that_can() -> None:
    it = desk()
    it.exchange(record("good"), record("cut", generation(ending=Ending.ENGINE_CUT)))
    assert [one.record_id for one in it.report("report", "good", "cut", "nowhere", score=1.0)] == ["cut"]
    assert [sample.record_id for sample in it.processor.build(0.0).samples] == ["good"]


def test_first_score_of_a_record_wins() -> None:
    it = desk()
    it.scored("r", 1.0)
    [second] = it.report("second", "r", score=0.0)
    assert second.record_id == "second"
    assert second.reason.startswith("already scored: r")
    [sample] = it.processor.build(0.0).samples
    assert sample.advantages[0] == 0.5


def test_record_quoted_twice_in_one_report_counts_once() -> None:
    it = desk()
    it.exchange(record("r"))
    it.report("report", "r", "r", score=1.0)
    assert len(it.processor.build(0.0).samples) == 1


def test_same_report_again_changes_nothing() -> None:
    it = desk()
    it.scored("r", 1.0)
    assert it.scored("r", 1.0) == []
    batch = it.processor.build(0.0)
    assert it.scored("r", 1.0) == []
    it.processor.acknowledge(batch)
    assert it.scored("r", 1.0) == []
    assert it.processor.counts()["pending"] == 0


def test_trained_record_never_trains_again() -> None:
    it = desk()
    it.scored("r", 1.0)
    batch = it.processor.build(0.0)
    [during] = it.report("during", "r", score=1.0)
    it.processor.acknowledge(batch)
    [after] = it.report("after", "r", score=1.0)
    assert during.reason.startswith("already scored: r")
    assert after.reason == "already consumed: r (trained)"


def test_record_that_the_store_knows_as_consumed_never_trains() -> None:
    it = desk()
    it.exchange(record("r"))
    [consumed] = it.report("report", "r", score=1.0, consumed={"r": Disposition.TRAINED})
    assert (consumed.record_id, consumed.reason) == ("report", "already consumed: r (trained)")
    assert not it.processor.ready(0.0)


# ---------------------------------------------------------------------------------------------- several answers


def test_several_answers_need_a_choice() -> None:
    it = desk()
    it.exchange(record("r", generation(2), generation(5)))
    [ambiguous] = it.report("report", "r", score=1.0)
    assert "ambiguous choice" in ambiguous.reason
    [unknown] = it.report("beyond", "r", score=1.0, choice=2)
    assert unknown.reason == "metadata.choice must be < 2, the number of answers, got 2"
    assert it.report("second", "r", score=1.0, choice=1) == []
    [sample] = it.processor.build(0.0).samples
    assert len(sample.output_ids) == 5


def test_choices_of_one_request_train_together_in_a_group() -> None:
    it = desk()
    it.exchange(record("r", generation(2), generation(3), generation(4)))
    for choice, score in enumerate((0.0, 1.0, 2.0)):
        assert it.report(f"report{choice}", "r", score=score, choice=choice, group="g", group_size=3) == []
    batch = it.processor.build(0.0)
    assert [(len(s.output_ids), s.advantages[0]) for s in batch.samples] == [(2, -1.0), (3, 0.0), (4, 1.0)]
    assert [one.record_id for one in batch.consumed].count("r") == 1


def test_late_choice_of_a_record_that_is_in_a_batch_never_trains() -> None:
    it = desk()
    it.exchange(record("r", generation(), generation(), generation()))
    it.report("first", "r", score=0.0, choice=0, group="g", group_size=2)
    it.report("second", "r", score=1.0, choice=1, group="g", group_size=2)
    it.processor.build(0.0)
    [late] = it.report("late", "r", score=1.0, choice=2, group="g", group_size=2)
    assert late.reason.startswith("already scored: r")


def test_choice_scored_twice_counts_once() -> None:
    it = desk()
    it.exchange(record("r", generation(), generation()))
    it.report("first", "r", score=0.0, choice=0, group="g", group_size=2)
    [again] = it.report("again", "r", score=1.0, choice=0, group="g", group_size=2)
    assert again.reason == "already scored: r"
    assert not it.processor.ready(0.0)  # and does not fill the group


def test_choices_outside_a_group_are_refused_with_the_way_out() -> None:
    it = desk()
    it.exchange(record("r", generation(), generation()))
    it.report("first", "r", score=0.0, choice=0)
    [second] = it.report("second", "r", score=1.0, choice=1)
    assert "must share metadata.group" in second.reason


def test_cut_choice_leaves_the_others_usable() -> None:
    it = desk()
    it.exchange(record("r", generation(ending=Ending.CLIENT_LEFT), generation()))
    [cut] = it.report("cut", "r", score=1.0, choice=0)
    assert (cut.record_id, cut.disposition) == ("cut", Disposition.INCOMPLETE)
    assert it.report("whole", "r", score=1.0, choice=1) == []


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"score": math.inf}, "score"),
        ({"score": 1.0, "group": 7}, "metadata.group"),
        ({"score": 1.0, "error": "and an error"}, "error"),
    ],
)
def test_report_that_another_recipe_let_in_is_consumed_not_raised(fields, name) -> None:
    it = desk()
    it.exchange(record("r"))
    [consumed] = it.report("report", "r", **fields)
    assert (consumed.record_id, consumed.disposition) == ("report", Disposition.INELIGIBLE)
    assert name in consumed.reason
    assert it.processor.counts()["refused.malformed"] == 1
