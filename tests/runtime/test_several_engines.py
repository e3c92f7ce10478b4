"""Real engines of which one stalls, refuses or dies in a publication: a clear error, never a mixture."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft")

from reef.artifact.content import DirectoryContentStore  # noqa: E402
from reef.errors import BarrierError, EngineError, EngineUncertain, ReefError, WorkerDied  # noqa: E402
from reef.inference.local.backend import LocalBackend  # noqa: E402
from reef.inference.local.client import LocalHandler  # noqa: E402
from reef.runtime.interfaces import (  # noqa: E402
    BASE_LOAD_ID,
    Candidate,
    Ending,
    MarkerState,
    PauseMode,
    Release,
    ReleaseKind,
    WeightKind,
    WeightLoad,
)
from reef.runtime.publication import Publication  # noqa: E402
from reef.runtime.recovery import MarkerFile  # noqa: E402
from reef.runtime.scheduler import TrainingCoordinator  # noqa: E402
from tests.inference.engines import Reader, ask, run, tiny_config  # noqa: E402
from tests.inference.references import make_adapter  # noqa: E402
from tests.inference.test_backend import Recorder  # noqa: E402

ENGINES = 2
HEALTH_SECONDS = 8.0
BOUND_SECONDS = 120.0  # far above HEALTH_SECONDS for a busy machine, far below the control timeout


class Fleet:
    """Engines, and a coordinator that publishes adapters of scenario "s" to them as if somebody wished for them."""

    def __init__(self, model: Path, path: Path) -> None:
        self.path = path
        self.recorder = Recorder()
        config = tiny_config(model, engines=ENGINES, health_timeout=HEALTH_SECONDS, kv_cache_tokens=4096)
        self.engines = LocalBackend(config, self.recorder, base_content_id="base")
        self.contents = DirectoryContentStore(path / "artifacts")
        self.marker = MarkerFile(path / "marker.json")
        self.publication = Publication(self.engines, self.contents, PauseMode.IN_PLACE, "base", list(range(40, 56)))
        self.coordinator = TrainingCoordinator(None, self.publication, self.contents, self.marker)
        self.adapters = []
        for seed in (1, 2):
            directory = make_adapter(model, path / f"adapter-{seed}", seed=seed)
            self.adapters.append(self.contents.put(directory))
        self.numbers = itertools.count(1)
        self.head = self._release(BASE_LOAD_ID, "base")
        self.engines.start()
        self.coordinator.recover([self.head], False)

    def _release(self, load: str, content: str) -> Release:
        return Release(
            release_id=load,
            scenario="s",
            number=0,
            parent_id=None,
            kind=ReleaseKind.PROMOTED,
            content_id=content,
            runtime_load_id=load,
            created_at=0.0,
        )

    def candidate(self) -> Candidate:
        """The adapter that the head does not serve."""
        load = f"engine:{next(self.numbers)}"
        return Candidate(
            job_id=f"job-{load}",
            scenario="s",
            content_id=next(one for one in self.adapters if one != self.head.content_id),
            state_id=None,
            kind=WeightKind.LORA,
            runtime_load_id=load,
            probe_logprobs=[],
            incumbent_probe_logprobs=[],
            origin=ReleaseKind.PROMOTED,
        )

    def release(self, candidate: Candidate) -> None:
        """Publish what is staged, and commit it."""
        self.coordinator.publish(candidate)
        self.head = self._release(candidate.runtime_load_id, candidate.content_id)
        self.coordinator.acknowledge(candidate.job_id, self.head)

    def signal(self, number: int) -> None:
        os.kill(self.recorder.pids[1], number)

    def state(self) -> MarkerState:
        found = self.marker.read()
        assert found is not None
        return found.state

    def all_serve_the_head(self) -> None:
        """Every engine, by its own word and by what it computes."""
        reports = self.engines.reports()
        assert [report.lanes["s"] for report in reports] == [self.head.runtime_load_id] * ENGINES
        assert [report.loads[self.head.runtime_load_id] for report in reports] == [self.head.content_id] * ENGINES
        assert not any(report.paused for report in reports)
        first, *others = self.engines.score(self.head.runtime_load_id, list(range(40, 56)))
        assert others == [first] * (ENGINES - 1)

    def within_bounds(self, call: Callable[[], object], *errors: type[ReefError]) -> str:
        began = time.monotonic()
        with pytest.raises(errors) as caught:
            call()
        assert time.monotonic() - began < BOUND_SECONDS
        assert "engine-1" in str(caught.value)
        return str(caught.value)


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tiny_model, tmp_path_factory.mktemp("fleet"))
    yield made
    made.engines.close()


async def _in_flight(fleet: Fleet, meanwhile: Callable[[], None]) -> list[Reader]:
    """Long answers, two on each engine, while something happens to the engines."""
    handler = LocalHandler(fleet.engines.endpoints)
    await handler.connect()
    readers = [Reader() for _ in range(2 * ENGINES)]
    tasks = [
        asyncio.ensure_future(reader.read(handler, ask(number, max_tokens=2500, lane="s")))
        for number, reader in enumerate(readers)
    ]
    await asyncio.gather(*(reader.has(3) for reader in readers))
    await asyncio.to_thread(meanwhile)
    await asyncio.gather(*tasks)
    await handler.close()
    return readers


def test_an_engine_that_stalls_while_weights_are_loaded(fleet):
    candidate = fleet.candidate()
    errors: list[str] = []

    def meanwhile() -> None:
        fleet.signal(signal.SIGSTOP)
        errors.append(fleet.within_bounds(lambda: fleet.coordinator.adopt(candidate), EngineUncertain))
        assert "no sign of life" in (fleet.publication.health() or "")
        fleet.coordinator.repair_engines()

    old = fleet.recorder.pids
    readers = run(_in_flight(fleet, meanwhile))
    assert "no sign of life" in errors[0] and not any(os.path.exists(f"/proc/{pid}") for pid in old)
    endings = [reader.chunks[-1].ending for reader in readers]
    assert endings.count(Ending.ENGINE_CUT) >= 2 and set(endings) <= {Ending.ENGINE_CUT, Ending.LENGTH}
    for reader, ending in zip(readers, endings, strict=True):  # cut, not replayed: what they had was committed
        assert reader.loads == [BASE_LOAD_ID] and (ending is Ending.LENGTH) == (len(reader.tokens) == 2500)
    fleet.all_serve_the_head()
    assert fleet.publication.health() is None and fleet.state() is MarkerState.CHECKPOINT
    fleet.release(fleet.coordinator.adopt(candidate))
    fleet.all_serve_the_head()


def test_an_engine_that_stalls_before_the_barrier(fleet):
    candidate = fleet.coordinator.adopt(fleet.candidate())
    fleet.signal(signal.SIGSTOP)
    fleet.within_bounds(lambda: fleet.coordinator.publish(candidate), BarrierError)
    assert fleet.state() is MarkerState.UPDATING_WEIGHTS
    fleet.release(candidate)  # replaced, and published in full
    fleet.all_serve_the_head()


def test_an_engine_that_dies_behind_the_barrier(fleet, monkeypatch):
    candidate = fleet.coordinator.adopt(fleet.candidate())
    with monkeypatch.context() as patch:
        activate = fleet.engines.activate

        def stricken(lane: str, runtime_load_id: str) -> None:
            fleet.signal(signal.SIGKILL)
            activate(lane, runtime_load_id)

        patch.setattr(fleet.engines, "activate", stricken)
        fleet.within_bounds(lambda: fleet.coordinator.publish(candidate), WorkerDied)
    fleet.coordinator.repair_engines()
    assert fleet.state() is MarkerState.UPDATING_WEIGHTS
    for report in fleet.engines.reports():  # as paused as those that it replaced, with what is committed
        assert report.paused and report.lanes["s"] == fleet.head.runtime_load_id
    fleet.coordinator.reject(candidate.job_id, "an engine was lost")
    assert fleet.state() is MarkerState.REJECTED
    fleet.all_serve_the_head()


def test_an_engine_that_refuses_the_weights(fleet):
    """One engine has the bytes already; the other reads a file that was damaged meanwhile."""
    candidate = fleet.candidate()
    known = WeightLoad(
        runtime_load_id="engine:known",
        content_id=candidate.content_id,
        kind=WeightKind.LORA,
        path=str(fleet.contents.path(candidate.content_id)),
    )
    executor = fleet.recorder.executors[-1]
    for report in fleet.engines.reports():
        assert candidate.content_id not in report.loads.values(), "the case needs engines that do not have it yet"
    executor.rpc(0, "stage", known).result(200)
    damaged = Path(known.path or "") / "adapter_model.safetensors"
    kept = fleet.path / "kept"
    shutil.copy(damaged, kept)
    damaged.unlink()
    damaged.write_bytes(b"garbage")
    try:
        message = fleet.within_bounds(lambda: fleet.coordinator.adopt(candidate), EngineError)
        assert "stage failed on engine-1: " in message and "engine-0" not in message
        assert all(candidate.runtime_load_id not in report.loads for report in fleet.engines.reports())
        fleet.all_serve_the_head()
        fleet.coordinator.reject(candidate.job_id, message)
        fleet.all_serve_the_head()
        assert fleet.publication.health() is None
    finally:
        damaged.unlink()
        shutil.copy(kept, damaged)
        fleet.engines.drop("engine:known")
    fleet.release(fleet.coordinator.adopt(fleet.candidate()))
    fleet.all_serve_the_head()
