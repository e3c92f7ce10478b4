"""What must hold when something fails between two lines: nobody else's records are lost, nothing stays paused."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from reef.errors import EngineError, StorageError, Unavailable, WorkerDied
from reef.runtime.interfaces import BASE_LOAD_ID, CommitKind, Disposition, MarkerState, ReleaseKind
from reef.scenario import steps
from tests.scenario.harness import Harness, teach
from tests.scenario.test_scenario import run


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(steps, "LONGEST_WAIT", 0.05)


def fail_marker(reef: Harness, monkeypatch, *states: MarkerState, times: int = 1) -> None:
    """The next `times` marker writes in one of `states` fail, as on a full disk."""
    real, left = reef.marker.write, [times]

    def write(marker):
        if marker.state in states and left[0]:
            left[0] -= 1
            raise StorageError("disk full")
        real(marker)

    monkeypatch.setattr(reef.marker, "write", write)


def test_a_job_in_flight_elsewhere_costs_nobody_a_batch(tmp_path):
    async def body(reef: Harness) -> None:
        reef.faults.plant("train", WorkerDied("killed"))
        other = await reef.another("t")
        await teach(reef, "a", "b")
        await reef.feedback("c", 0.0, scenario="t")
        await reef.feedback("d", 1.0, scenario="t")
        await reef.released(1)
        await reef.until(lambda: other.head.number == 1)
        found = {**await reef.storage.consumed("s", ["a", "b"]), **await reef.storage.consumed("t", ["c", "d"])}
        assert set(found.values()) == {Disposition.TRAINED} and len(found) == 4
        await other.close()

    run(body, tmp_path)


@pytest.mark.parametrize("state", [MarkerState.HEAD_COMMITTED, MarkerState.COMPLETE])
def test_after_the_commit_a_failing_marker_never_brings_the_old_release_back(tmp_path, monkeypatch, state):
    async def body(reef: Harness) -> None:
        fail_marker(reef, monkeypatch, state)
        await teach(reef, "a", "b")
        await reef.released(1)
        await reef.until(lambda: reef.state() is MarkerState.COMPLETE)
        assert reef.engines.lanes["s"] == reef.scenario.head.runtime_load_id != BASE_LOAD_ID
        await teach(reef, "c", "d")
        await reef.released(2)
        assert [commit.kind for commit in await reef.storage.commits("s")] == [CommitKind.TRAINED] * 2

    run(body, tmp_path)


def test_a_release_that_cannot_be_acknowledged_is_resumed_by_the_supervisor(tmp_path, monkeypatch):
    monkeypatch.setattr("reef.runtime.coordinator.OWED_SECONDS", 0.1)
    monkeypatch.setattr(steps, "ATTEMPTS", 1)

    async def body(reef: Harness) -> None:
        reef.faults.plant("resume", EngineError("stuck"))
        await teach(reef, "a", "b")
        await reef.released(1)
        await reef.until(lambda: reef.state() is MarkerState.COMPLETE)
        assert reef.engines.lanes["s"] == reef.scenario.head.runtime_load_id

    run(body, tmp_path)


def test_garbage_that_cannot_be_removed_stops_nobody(tmp_path):
    async def body(reef: Harness) -> None:
        reef.released_error = OSError("read-only")
        await teach(reef, "a", "b")
        await reef.released(1)
        await teach(reef, "c", "d")
        await reef.released(2)

    run(body, tmp_path)


@pytest.mark.parametrize("state", [MarkerState.UPDATING_WEIGHTS, MarkerState.READY_TO_COMMIT])
def test_a_rollback_on_a_full_disk_leaves_nothing_paused(tmp_path, monkeypatch, state):
    async def body(reef: Harness) -> None:
        await teach(reef, "a", "b")
        await reef.released(1)
        head = reef.scenario.head
        fail_marker(reef, monkeypatch, state, MarkerState.REJECTING, MarkerState.REJECTED, times=8)
        with pytest.raises(Unavailable, match="given up"):
            await reef.scenario.rollback()
        assert reef.scenario.head == head and reef.engines.lanes["s"] == head.runtime_load_id
        assert not reef.engines.paused and reef.state() is MarkerState.REJECTED
        assert (await reef.scenario.rollback()).kind is ReleaseKind.ROLLBACK

    run(body, tmp_path)


def test_engines_that_die_while_a_rejection_restores_them_are_settled(tmp_path):
    async def body(reef: Harness) -> None:
        reef.verdict.selected = False
        reef.faults.plant("drop", WorkerDied("killed"))
        reef.faults.plant("restart", WorkerDied("killed again"))
        await teach(reef, "a", "b")
        await reef.until(lambda: reef.scenario._steps.outcome.startswith("rejected"))
        assert reef.state() is MarkerState.REJECTED and not reef.engines.paused
        assert reef.engines.lanes["s"] == BASE_LOAD_ID

    run(body, tmp_path)


def test_a_batch_that_kills_the_trainer_is_written_off(tmp_path):
    async def body(reef: Harness) -> None:
        for nth in range(1, steps.DEADLY_BATCH + 1):
            reef.faults.plant("train", WorkerDied("out of memory"), nth)
        await teach(reef, "a", "b")
        await reef.until(lambda: "died 3 times" in reef.scenario._steps.outcome)
        assert set((await reef.storage.consumed("s", ["a", "b"])).values()) == {Disposition.REJECTED}
        await teach(reef, "c", "d")
        await reef.released(1)

    run(body, tmp_path)


def test_a_full_disk_in_the_trainer_costs_no_batch(tmp_path):
    async def body(reef: Harness) -> None:
        reef.faults.plant("train", StorageError("disk full"))
        await teach(reef, "a", "b")
        await reef.released(1)
        assert set((await reef.storage.consumed("s", ["a", "b"])).values()) == {Disposition.TRAINED}

    run(body, tmp_path)


def test_an_engine_that_dies_under_the_evaluation_is_no_verdict(tmp_path):
    async def body(reef: Harness) -> None:
        reef.verdict.error = EngineError("killed")
        await teach(reef, "a", "b")
        await reef.until(lambda: len(reef.verdict.asked) == 1)
        reef.verdict.error = None
        await reef.released(1)
        assert len(reef.trainer.trained) == 1, "the candidate is kept"

    run(body, tmp_path)


def test_a_trainer_with_a_bug_is_a_bad_batch_not_an_endless_loop(tmp_path):
    async def body(reef: Harness) -> None:
        reef.faults.plant("train", RuntimeError("shape mismatch"))
        await teach(reef, "a", "b")
        await reef.until(lambda: "shape mismatch" in reef.scenario._steps.outcome)
        await teach(reef, "c", "d")
        await reef.released(1)

    run(body, tmp_path)


def test_what_cannot_be_staged_is_given_back_and_trains_later(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "ATTEMPTS", 2)

    async def body(reef: Harness) -> None:
        for nth in (1, 2):
            reef.faults.plant("stage", EngineError("max-loads"), nth)
        await teach(reef, "a", "b")
        await reef.released(1)
        assert set((await reef.storage.consumed("s", ["a", "b"])).values()) == {Disposition.TRAINED}
        assert len(reef.trainer.trained) == 2 and [c.kind for c in await reef.storage.commits("s")] == ["trained"]

    run(body, tmp_path)


def test_engines_are_replaced_while_a_step_trains(tmp_path):
    async def body(reef: Harness) -> None:
        inside, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        real = reef.trainer.train

        def slow(job):
            loop.call_soon_threadsafe(inside.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(100)
            return real(job)

        reef.trainer.train = slow  # type: ignore[method-assign]
        await teach(reef, "a", "b")
        await asyncio.wait_for(inside.wait(), 60)
        reef.engines.trouble = "engine-0 died"
        await reef.until(lambda: "restart" in reef.faults.calls and not reef.engines.paused)
        go_on.set()
        await reef.released(1)

    run(body, tmp_path)


def test_a_commit_whose_answer_is_lost_is_the_same_commit_when_repeated(tmp_path, monkeypatch):
    async def body(reef: Harness) -> None:
        real, lost = reef.storage.commit, []

        async def commit(wanted):
            stored = await real(wanted)
            if wanted.release is not None and not lost:
                lost.append(wanted.commit_id)
                raise StorageError("the answer is lost")
            return stored

        monkeypatch.setattr(reef.storage, "commit", commit)
        await teach(reef, "a", "b")
        await reef.released(1)
        assert lost and [c.kind for c in await reef.storage.commits("s")] == [CommitKind.TRAINED]
        assert reef.engines.lanes["s"] == reef.scenario.head.runtime_load_id

    run(body, tmp_path)


class Lossy:
    """A channel whose coordinator takes an order and is away before it has answered, and for some calls more."""

    def __init__(self, channel, method: str, away: int) -> None:
        self._channel, self._method, self._away = channel, method, away
        self._lost = False

    def __getattr__(self, name):
        return getattr(self._channel, name)

    async def call(self, method, *args):
        if self._lost and self._away and method not in ("marker", "remember"):
            self._away -= 1
            raise Unavailable("the coordinator is being replaced")
        if method != self._method or self._lost:
            return await self._channel.call(method, *args)
        self._lost = True
        while await self._channel.call(method, *args) is None:
            pass
        raise WorkerDied("the coordinator did not answer")


@pytest.mark.parametrize("away", [1, 3, 12])
def test_a_coordinator_that_is_lost_with_a_job_is_asked_for_it_until_it_is_back(tmp_path, away):
    """After many attempts the batch is given back, and the job is ended where it may still be."""

    async def body(reef: Harness) -> None:
        reef.runtime._channel = Lossy(reef.runtime._channel, "train", away)
        await teach(reef, "a", "b")
        await reef.released(1)
        await reef.until(lambda: reef.state() is MarkerState.COMPLETE)
        assert set((await reef.storage.consumed("s", ["a", "b"])).values()) == {Disposition.TRAINED}
        await teach(reef, "c", "d")
        await reef.released(2)

    run(body, tmp_path)


def test_a_rollback_whose_coordinator_is_lost_leaves_nothing_in_flight(tmp_path):
    async def body(reef: Harness) -> None:
        await teach(reef, "a", "b")
        await reef.released(1)
        reef.runtime._channel = Lossy(reef.runtime._channel, "adopt", 2)
        with contextlib.suppress(Unavailable):
            await reef.scenario.rollback("0")
        before = reef.scenario.head.number
        await teach(reef, "c", "d")
        await reef.released(before + 1)

    run(body, tmp_path)
