"""What learning counts. Counters belong to the process, so tests look at differences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from reef.metrics import REGISTRY
from reef.runtime.interfaces import CoordinatorStatus
from reef.runtime.recovery import Supervisor, Watched
from tests.runtime.fakes import IdleHandler
from tests.scenario.harness import Harness
from tests.scenario.test_scenario import run


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"reef_{name}", labels) or 0.0


@contextmanager
def counts(name: str, number: float, **labels: str) -> Iterator[None]:
    """The block adds so much."""
    before = value(name, **labels)
    yield
    assert value(name, **labels) - before == number, (name, labels)


def test_a_release_is_counted_with_its_step_its_pause_and_what_it_consumed(tmp_path):
    async def body(reef: Harness) -> None:
        with (
            counts("training_seconds_count", 2),
            counts("training_steps_total", 2, scenario="s", outcome="released"),
            counts("publications_total", 2, scenario="s", kind="trained"),
            counts("publications_total", 1, scenario="s", kind="rollback"),
            counts("publication_pause_seconds_count", 3),
            counts("consumed_records_total", 8, scenario="s", disposition="trained"),
            counts("staleness_releases_count", 4),
            counts("staleness_releases_sum", 1),  # one answer of the base, trained on top of the first release
        ):
            base = reef.scenario.head.release_id
            await reef.feedback("a", 1.0)
            await reef.feedback("b", 0.0)
            await reef.released(1)
            await reef.feedback("c", 1.0, release_id=base)
            await reef.feedback("d", 0.0)
            await reef.released(2)
            await reef.scenario.rollback()

    run(body, tmp_path)


def test_a_rejected_step_is_counted_and_publishes_nothing(tmp_path):
    async def body(reef: Harness) -> None:
        reef.verdict.selected = False
        with (
            counts("training_steps_total", 1, scenario="s", outcome="rejected"),
            counts("publications_total", 0, scenario="s", kind="trained"),
            counts("consumed_records_total", 4, scenario="s", disposition="rejected"),
            counts("staleness_releases_count", 0),
        ):
            await reef.feedback("a", 1.0)
            await reef.feedback("b", 0.0)
            await reef.until(lambda: reef.scenario._steps.outcome.startswith("rejected"))

    run(body, tmp_path)


def status(incarnation: str, **fields: object) -> CoordinatorStatus:
    return CoordinatorStatus(
        incarnation=incarnation, generation=0, endpoints=[], engines=None, trainer=None, **fields
    )  # fmt: skip


def test_restarts_and_pauses_are_counted_once_however_often_one_looks(tmp_path):
    import asyncio

    from reef.runtime.deployment import EngineRuntime

    seen = [
        status("one", restarts={"engine": 3}, pause_phases={"barrier": 1.0}),  # before this process looked
        status("one", restarts={"engine": 4}, pause_phases={"barrier": 1.0}),
        status("one", restarts={"engine": 4}, pause_phases={"barrier": 0.5, "switch": 0.25}),
        status("two", restarts={"trainer": 1}),
        status("two", restarts={"trainer": 1}),
    ]

    class FakeChannel:
        async def refresh(self) -> CoordinatorStatus:
            return seen.pop(0)

    async def look() -> None:
        runtime = EngineRuntime(FakeChannel(), IdleHandler)
        while seen:
            await runtime.follow()

    with (
        counts("component_restarts_total", 1, component="engine"),
        counts("component_restarts_total", 1, component="trainer"),
        counts("component_restarts_total", 1, component="coordinator"),
        counts("publication_pause_seconds_count", 1),
        counts("publication_pause_seconds_sum", 0.75),
    ):
        asyncio.run(look())


def test_the_supervisor_counts_what_it_replaced_only():
    repairs = iter([False, True])
    supervisor = Supervisor()
    watched = Watched("engine", lambda: "dead", lambda: next(repairs))
    supervisor._closing.wait = lambda seconds: False  # no delays
    for _ in range(2):
        supervisor._replace(watched, "dead")
    assert supervisor.replaced == {"engine": 1}
