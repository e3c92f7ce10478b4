"""Many scenarios and one turn: who goes first, who waits for whom, and who never has to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from reef.errors import StorageError, Unavailable
from reef.runtime import scheduler
from reef.runtime.interfaces import BASE_LOAD_ID, Disposition, TrainJob
from reef.scenario import steps
from tests.scenario.harness import Harness
from tests.scenario.test_scenario import run

OTHERS = [f"s{number}" for number in range(19)]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(steps, "LONGEST_WAIT", 0.02)
    monkeypatch.setattr(scheduler, "FIRST_BACKOFF", 0.02)
    monkeypatch.setattr(scheduler, "LONGEST_BACKOFF", 0.5)


@contextlib.asynccontextmanager
async def with_others(reef: Harness, names: list[str]) -> AsyncIterator[list[str]]:
    """More scenarios beside "s"; yields the scenarios in the order in which they train."""
    reef.engines.slots = 32
    order: list[str] = []
    _each_job(reef, lambda job: order.append(job.scenario))
    for name in names:
        await reef.another(name)
    try:
        yield order
    finally:
        for other in reef.others.values():
            await other.close()


def _each_job(reef: Harness, look: Callable[[TrainJob], None]) -> None:
    real = reef.trainer.train

    def train(job):
        look(job)
        return real(job)

    reef.trainer.train = train  # type: ignore[method-assign]


@contextlib.contextmanager
def held(reef: Harness):
    """The next steps wait in the trainer until the block ends."""
    go_on = threading.Event()
    _each_job(reef, lambda job: go_on.wait(200) or pytest.fail("nobody let the trainer go on"))
    try:
        yield
    finally:
        go_on.set()


async def pair(reef: Harness, scenario: str, name: str) -> None:
    for score in (0.0, 1.0):
        await reef.feedback(f"{scenario}-{name}-{score}", score, scenario=scenario)


async def queued(reef: Harness, number: int) -> None:
    await reef.until(lambda: len(reef.services.turn._waiters or ()) == number)


def test_recording_never_waits_for_training_and_a_busy_scenario_starves_nobody(tmp_path):
    async def body(reef: Harness) -> None:
        async with with_others(reef, OTHERS) as order:
            with held(reef):
                await pair(reef, "s", "first")
                await reef.until(lambda: reef.scenario._steps.in_flight)
                for number in range(4):  # all of it is stored while a step is in the trainer
                    await pair(reef, "s", str(number))
                for name in OTHERS:
                    await pair(reef, name, "only")
                assert (await reef.storage.counts("s"))["report"] == 10 and order == []
                await queued(reef, len(OTHERS))
            await reef.until(lambda: all(other.head.number == 1 for other in reef.others.values()))
            assert Counter(order[: len(OTHERS) + 2])["s"] <= 2, "everybody had a turn before its third"
            await reef.until(lambda: reef.scenario.head.number == 5)
            assert Counter(order) == {"s": 5, **dict.fromkeys(OTHERS, 1)}

    run(body, tmp_path)


def test_who_was_ready_first_goes_first(tmp_path):
    async def body(reef: Harness) -> None:
        expected = OTHERS[5::-1]
        async with with_others(reef, expected[::-1]) as order:
            with held(reef):
                await pair(reef, "s", "first")
                await reef.until(lambda: reef.scenario._steps.in_flight)
                for number, name in enumerate(expected, start=1):
                    await pair(reef, name, "only")
                    await queued(reef, number)
                await pair(reef, "s", "second")
            await reef.until(lambda: len(order) == 8)
            assert order == ["s", *expected, "s"]

    run(body, tmp_path)


def test_a_step_that_always_fails_has_its_turns_and_no_more(tmp_path):
    async def body(reef: Harness) -> None:
        broken, others = {"s"}, OTHERS[:6]
        async with with_others(reef, others) as order:

            def fail(job: TrainJob) -> None:
                if job.scenario in broken:
                    raise StorageError("its disk is full")

            _each_job(reef, fail)  # fails before it is in `order`
            jobs: list[tuple[str, str]] = []
            _each_job(reef, lambda job: jobs.append((job.scenario, job.job_id)))
            await pair(reef, "s", "bad")
            for number in range(3):
                for name in others:
                    await pair(reef, name, str(number))
            await reef.until(lambda: all(other.head.number == 3 for other in reef.others.values()))
            assert set(order) == set(others)
            attempts = list(Counter(job_id for scenario, job_id in jobs if scenario == "s").values())
            assert attempts[0] == steps.ATTEMPTS and set(attempts[1:]) <= {1}, "later it holds nobody up"
            await reef.until(lambda: "given up after 1 attempts" in (reef.scenario._scheduler.error or ""))
            reports = [f"report-s-bad-{score}" for score in (0.0, 1.0)]
            assert await reef.storage.consumed("s", reports) == {}
            broken.clear()
            await reef.released(1)
            assert set((await reef.storage.consumed("s", reports)).values()) == {Disposition.TRAINED}

    run(body, tmp_path)


def test_the_waits_of_a_failing_scenario_grow_to_a_bound_and_end_with_a_success(monkeypatch):
    waits: list[float] = []
    outcomes = [*["fail"] * 9, "learn", "fail", "end"]

    async def body() -> None:
        async def due() -> bool:
            return True

        async def learn() -> None:
            match outcomes.pop(0):
                case "fail":
                    raise Unavailable("no slot")
                case "end":
                    ended.set()
                    await asyncio.sleep(3600)

        async def sleep(seconds: float) -> None:
            assert not turn.locked(), "it waits without the turn"
            waits.append(seconds)

        ended, turn, real_sleep = asyncio.Event(), asyncio.Lock(), asyncio.sleep
        tested = scheduler.RuntimeScheduler("s", due, learn, turn)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", lambda seconds: (real_sleep if seconds > 1000 else sleep)(seconds))
            tested.start()
            await asyncio.wait_for(ended.wait(), 60)
            await tested.close()

    monkeypatch.undo()
    asyncio.run(body())
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0, 120.0, 1.0]


def test_a_scenario_that_finds_no_slot_says_so_and_the_others_go_on(tmp_path):
    async def body(reef: Harness) -> None:
        reef.engines.slots = 2
        other = await reef.another("t")
        await pair(reef, "s", "first")
        await reef.released(1)
        await pair(reef, "t", "first")
        await reef.until(lambda: "inference.max-loads (2)" in (other._scheduler.error or ""))
        assert "scenario 't' cannot be published" in (await other.status())["error"]
        await pair(reef, "s", "second")
        await reef.released(2)
        assert other.head.runtime_load_id == BASE_LOAD_ID and len(reef.trainer.trained) == 2
        await reef.scenario.rollback("0")
        await reef.until(lambda: other.head.number == 1)
        await other.close()

    run(body, tmp_path)
