from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from reef.artifact import chain
from reef.errors import BarrierError, Conflict, StorageError, TrainingError, WorkerDied
from reef.records.sqlite import SqliteStorage
from reef.runtime.interfaces import BASE_LOAD_ID, CommitKind, Disposition, Ending, ReleaseKind, ReportRecord
from reef.scenario import steps
from tests.scenario.harness import Harness


def run(body, path, **recipe):
    async def go():
        harness = await Harness(path, **recipe).boot()
        try:
            await asyncio.wait_for(body(harness), 250)
        finally:
            await harness.stop()

    asyncio.run(go())


def test_feedback_becomes_a_release(tmp_path):
    async def body(reef: Harness) -> None:
        await reef.feedback("a", 1.0)
        await reef.feedback("b", 0.0)
        await reef.released(1)
        release = reef.scenario.head
        assert release.kind is ReleaseKind.TRAINED and reef.engines.lanes["s"] == release.runtime_load_id
        commit = (await reef.storage.commits("s"))[0]
        assert commit.kind is CommitKind.TRAINED and commit.metrics["loss"] == 0.5
        dispositions = await reef.storage.consumed("s", ["a", "b", "report-a", "report-b"])
        assert set(dispositions.values()) == {Disposition.TRAINED} and len(dispositions) == 4

    run(body, tmp_path)


def test_equal_scores_train_nothing_and_say_so(tmp_path):
    # Both reports share a group, so equal scores carry no signal.
    async def grouped(reef: Harness) -> None:
        for name in "ab":
            await reef.storage.append(reef.exchange(name))
        for name in "ab":
            await reef.scenario.report(
                ReportRecord(
                    record_id=f"report-{name}",
                    scenario="s",
                    created_at=1.0,
                    references=[name],
                    score=1.0,
                    metadata={"group": "g", "group_size": 2},
                )
            )
        await reef.until(lambda: reef.scenario._steps.outcome == "no signal")
        assert reef.scenario.head.number == 0 and reef.trainer.trained == []
        assert set((await reef.storage.consumed("s", ["a", "b"])).values()) == {Disposition.NO_SIGNAL}

    run(grouped, tmp_path)


@pytest.mark.parametrize("how", ["decide", "raise"])
def test_a_rejected_candidate_never_serves_and_its_records_are_spent(tmp_path, how):
    async def body(reef: Harness) -> None:
        reef.verdict.selected = False
        reef.verdict.error = RuntimeError("scorer broke") if how == "raise" else None
        await reef.feedback("a", 1.0)
        await reef.feedback("b", 0.0)
        await reef.until(lambda: reef.scenario._steps.outcome.startswith("rejected"))
        assert reef.scenario.head.number == 0 and reef.engines.lanes["s"] == BASE_LOAD_ID
        assert set((await reef.storage.consumed("s", ["a", "b"])).values()) == {Disposition.REJECTED}
        job_id = reef.trainer.trained[0]
        promoted = await reef.scenario.promote(job_id)
        assert promoted.kind is ReleaseKind.PROMOTED and reef.engines.lanes["s"] == promoted.runtime_load_id

    run(body, tmp_path)


def test_incomplete_answers_never_train(tmp_path):
    async def body(reef: Harness) -> None:
        await reef.feedback("cut", 1.0, ending=Ending.ENGINE_CUT)
        await reef.feedback("left", 0.0, ending=Ending.CLIENT_LEFT)
        await reef.feedback("a", 1.0)
        await reef.feedback("b", 0.0)
        await reef.released(1)
        found = await reef.storage.consumed("s", ["cut", "left", "a", "b"])
        assert found["cut"] is found["left"] is Disposition.INCOMPLETE
        assert found["a"] is found["b"] is Disposition.TRAINED

    run(body, tmp_path)


def test_a_bad_batch_is_written_off_and_the_next_one_trains(tmp_path):
    async def body(reef: Harness) -> None:
        reef.faults.plant("train", TrainingError("loss is nan"))
        await reef.feedback("a", 1.0)
        await reef.feedback("b", 0.0)
        await reef.until(lambda: "nan" in reef.scenario._steps.outcome)
        await reef.feedback("c", 1.0)
        await reef.feedback("d", 0.0)
        await reef.released(1)
        found = await reef.storage.consumed("s", ["a", "c"])
        assert found == {"a": Disposition.REJECTED, "c": Disposition.TRAINED}

    run(body, tmp_path)


def test_a_failed_barrier_is_retried_in_full(tmp_path):
    async def body(reef: Harness) -> None:
        reef.faults.plant("pause", BarrierError("flush refused"))
        await reef.feedback("a", 1.0)
        await reef.feedback("b", 0.0)
        await reef.released(1)
        assert "restart" in reef.faults.calls and len(reef.trainer.trained) == 1
        assert len(reef.verdict.asked) == 1, "the judgement is not repeated"

    run(body, tmp_path)


def test_a_store_that_refuses_the_commit_leaves_the_old_release_serving(tmp_path, monkeypatch):
    async def body(reef: Harness) -> None:
        real = reef.storage.commit

        async def refuse(commit):
            if commit.release is not None and commit.release.kind is ReleaseKind.TRAINED and refusing:
                raise StorageError("disk full")
            return await real(commit)

        monkeypatch.setattr(steps, "ATTEMPTS", 2)
        refusing = [True]
        monkeypatch.setattr(reef.storage, "commit", refuse)
        await reef.feedback("a", 1.0)
        await reef.feedback("b", 0.0)
        await reef.until(lambda: "given up" in (reef.scenario._scheduler.error or ""))
        assert reef.engines.lanes["s"] == BASE_LOAD_ID and not reef.engines.paused
        assert reef.scenario.head.number == 0
        refusing.clear()  # space returns
        await reef.released(1)
        assert (await reef.storage.consumed("s", ["a"]))["a"] is Disposition.TRAINED

    run(body, tmp_path)


def test_rollback_publishes_the_old_content_as_a_new_release(tmp_path):
    async def body(reef: Harness) -> None:
        await reef.feedback("a", 1.0)
        await reef.feedback("b", 0.0)
        await reef.released(1)
        first = reef.scenario.head
        back = await reef.scenario.rollback()
        assert back.number == 2 and back.kind is ReleaseKind.ROLLBACK and back.content_id == "base"
        assert reef.engines.lanes["s"] == back.runtime_load_id != BASE_LOAD_ID
        with pytest.raises(Conflict):
            await reef.scenario.rollback()
        forward = await reef.scenario.rollback(first.release_id)
        assert forward.number == 3 and forward.content_id == first.content_id
        assert [release.number for release in await reef.storage.releases("s")] == [3, 2, 1, 0]

    run(body, tmp_path)


def test_after_a_crash_at_the_gate_the_candidate_is_published_without_training_again(tmp_path):
    async def body() -> None:
        reef = await Harness(tmp_path).boot()
        real = reef.runtime.publish

        async def die(candidate):
            await real(candidate)
            raise asyncio.CancelledError  # the service is gone with READY_TO_COMMIT on disk

        reef.runtime.publish = die  # type: ignore[method-assign]
        await reef.feedback("a", 1.0)
        await reef.feedback("b", 0.0)
        await reef.until(lambda: reef.engines.paused)
        await reef.stop()
        assert reef.scenario.head.number == 0
        await reef.boot()
        await reef.released(1)
        assert reef.trainer.trained == [] and (await reef.storage.consumed("s", ["a"]))["a"] is Disposition.TRAINED
        await asyncio.sleep(0.1)
        assert reef.scenario.head.number == 1, "nothing may train twice"
        await reef.stop()

    asyncio.run(asyncio.wait_for(body(), 250))


def test_a_resume_that_fails_after_the_commit_is_repeated(tmp_path):
    async def body(reef: Harness) -> None:
        resumes = reef.faults.calls.count("resume")
        assert resumes == 1
        reef.faults.plant("resume", WorkerDied("killed"))
        await reef.feedback("a", 1.0)
        await reef.feedback("b", 0.0)
        await reef.released(1)
        assert reef.engines.lanes["s"] == reef.scenario.head.runtime_load_id
        assert len(reef.trainer.trained) == 1

    run(body, tmp_path)


def test_a_release_may_be_named_by_its_number(tmp_path):
    async def body(reef: Harness) -> None:
        await reef.feedback("a", 1.0)
        await reef.feedback("b", 0.0)
        await reef.released(1)
        assert (await reef.scenario.rollback("0")).content_id == "base"

    run(body, tmp_path)


def test_what_may_not_train_never_does_and_holds_up_nothing(tmp_path):
    async def feed(reef: Harness) -> None:
        for name, train in (("barred", False), ("a", True), ("b", True)):
            await reef.storage.append(replace(reef.exchange(name), train=train))
        for name, references, train in (
            ("r1", ["barred"], True),
            ("r2", ["a"], False),
            ("r3", ["barred", "a"], True),
            ("r4", ["b"], True),
        ):
            score = 1.0 if name == "r3" else 0.0
            await reef.storage.append(
                ReportRecord(
                    record_id=name, scenario="s", created_at=1.0, references=references, score=score, train=train
                )
            )

    async def body() -> None:
        reef = Harness(tmp_path)
        storage = SqliteStorage(tmp_path / "reef.db")  # stored by a service that ended before it looked at them
        await storage.open()
        await storage.create_scenario(chain.base_release("s", "base", 1.0))
        reef.storage = storage
        reef.scenario = SimpleNamespace(name="s", head=(await storage.scenario("s")).head)
        await feed(reef)
        await storage.close()
        await reef.boot()
        try:
            await asyncio.wait_for(reef.released(1), 100)
            fates = await reef.storage.consumed("s", ["barred", "a", "b", "r1", "r2", "r3", "r4"])
            assert fates.pop("barred") == fates.pop("r1") == fates.pop("r2") == Disposition.INELIGIBLE
            assert set(fates.values()) == {Disposition.TRAINED} and len(fates) == 4
        finally:
            await reef.stop()

    asyncio.run(body())


def test_a_scenario_that_may_not_train_leaves_everything_waiting(tmp_path):
    async def body(reef: Harness) -> None:
        reef.services.may_train = lambda name: name != "quiet"
        quiet = await reef.another("quiet")
        await reef.feedback("qa", 1.0, "quiet")
        await reef.feedback("qb", 0.0, "quiet")
        with pytest.raises(Conflict, match="training is off for scenario 'quiet'"):
            await quiet.update()
        await reef.feedback("a", 1.0)
        await reef.feedback("b", 0.0)
        await reef.released(1)
        assert quiet.head.number == 0 and await reef.storage.consumed("quiet", ["qa", "report-qa"]) == {}

    run(body, tmp_path)
