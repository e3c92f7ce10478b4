"""A real engine stages and scores while it serves: who waits for whom, and what ends a staging halfway."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from reef.errors import EngineError, EngineUncertain
from reef.inference.local.loads import Loads
from reef.inference.local.slices import Slices
from reef.inference.local.worker import EngineWorker, _Chore
from reef.runtime.interfaces import BASE_LOAD_ID, PauseMode, WeightLoad
from tests.inference.engines import Brake, Reader, ask, run, tiny_config
from tests.inference.references import lora_load, make_adapter
from tests.inference.test_worker import client, control, fail_steps

IDS = list(range(50, 114))


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny_model, tmp_path_factory.mktemp("weights") / "lora", seed=31)


@pytest.fixture
def fresh(tiny_model: Path) -> Iterator[tuple[EngineWorker, str]]:
    directory = tempfile.mkdtemp(prefix="reef-test-")
    worker = EngineWorker(config=tiny_config(tiny_model), name="engine-0", listen=f"{directory}/engine-0")
    yield worker, f"{directory}/engine-0"
    worker.close()
    shutil.rmtree(directory)


class Halfway:
    """Stagings stop before their last slice, without keeping the step loop, until `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._go_on = threading.Event(), threading.Event()
        real = Loads._read_adapter

        def read(loads: Loads, path: Path) -> Slices[object]:
            adapter = yield from real(loads, path)
            while not self._go_on.is_set():
                self.reached.set()
                time.sleep(0.001)
                yield
            return adapter

        monkeypatch.setattr(Loads, "_read_adapter", read)

    def go_on(self) -> None:
        self._go_on.set()


@pytest.fixture
def halfway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Halfway]:
    found = Halfway(monkeypatch)
    yield found
    found.go_on()


@pytest.fixture
def callers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def load(load_id: str, path: Path) -> WeightLoad:
    return lora_load(load_id, path)


def test_a_step_runs_between_any_two_slices(fresh, adapter, monkeypatch):
    worker, path = fresh
    monkeypatch.setattr("reef.inference.local.worker._CHORE_SHARE", 0.0)
    at_rest = worker.score(BASE_LOAD_ID, IDS)

    async def body():
        async with client(path) as handler:
            reader = Reader()
            task = asyncio.ensure_future(reader.read(handler, ask(max_tokens=3500)))
            await reader.has(3)
            steps = [(await control(worker.report)).stats["steps"]]
            await control(worker.stage, load("engine:1", adapter))
            steps.append((await control(worker.report)).stats["steps"])
            assert await control(worker.score, BASE_LOAD_ID, IDS) == at_rest
            steps.append((await control(worker.report)).stats["steps"])
            assert not task.done()
            assert steps[1] - steps[0] > 20 and steps[2] - steps[1] >= 6  # 2 layers, 4 stretches of the output
            task.cancel()

    run(body())


def test_a_chore_gets_a_tenth_of_a_step_and_more_the_longer_it_takes(monkeypatch):
    now = 0.0
    monkeypatch.setattr("reef.inference.local.worker.time", SimpleNamespace(monotonic=lambda: now))

    def slices() -> Slices[None]:
        nonlocal now
        while True:
            now += 0.002
            yield

    def taken(chore: _Chore, step_seconds: float) -> float:
        began = now
        assert not chore.advance(step_seconds)
        return round(now - began, 6)

    chore = _Chore(slices(), Future())
    assert [taken(chore, seconds) for seconds in (0.0, 0.001, 0.05, 0.1)] == [0.002, 0.002, 0.006, 0.01]
    now = 20.0
    assert taken(chore, 0.05) == pytest.approx(0.1, abs=0.003)


def test_a_publication_and_requests_go_on_while_something_is_staged(fresh, adapter, halfway, callers, monkeypatch):
    worker, path = fresh
    brake = Brake(monkeypatch, worker.report)
    worker.stage(WeightLoad(runtime_load_id="engine:1", content_id="base", kind=load("x", adapter).kind, path=None))
    staging = callers.submit(worker.stage, load("engine:2", adapter))
    assert halfway.reached.wait(200)

    async def body():
        async with client(path) as handler:
            reader = Reader()
            await control(brake.hold, 30)
            task = asyncio.ensure_future(reader.read(handler, ask(max_tokens=60, lane="shop")))
            await reader.has(3)
            await control(worker.pause, PauseMode.IN_PLACE)
            await control(worker.activate, "shop", "engine:1")
            assert (await control(worker.report)).paused
            await control(brake.lift)
            await control(worker.resume)
            await task
            assert reader.loads == [BASE_LOAD_ID, "engine:1"] and len(reader.tokens) == 60

    run(body())
    assert not staging.done()
    halfway.go_on()
    staging.result(200)
    assert "engine:2" in worker.report().loads


def test_staged_and_scored_while_paused(fresh, adapter):
    worker, path = fresh

    async def body():
        async with client(path) as handler:
            reader = Reader()
            task = asyncio.ensure_future(reader.read(handler, ask(max_tokens=3500)))
            await reader.has(3)
            await control(worker.pause, PauseMode.IN_PLACE)
            before = await control(worker.report)
            await control(worker.stage, load("engine:1", adapter))
            assert await control(worker.score, "engine:1", IDS) != await control(worker.score, BASE_LOAD_ID, IDS)
            after = await control(worker.report)
            assert after.paused and after.stats["steps"] == before.stats["steps"] and "engine:1" in after.loads
            assert not task.done()
            task.cancel()

    run(body())


def test_two_stagings_at_once_both_end(fresh, adapter, halfway, callers):
    worker, _ = fresh
    first = callers.submit(worker.stage, load("engine:1", adapter))
    assert halfway.reached.wait(200)
    second = callers.submit(worker.stage, load("engine:2", adapter))
    again = callers.submit(worker.stage, load("engine:1", adapter))
    halfway.go_on()
    for future in (first, second, again):
        future.result(200)
    assert set(worker.report().loads) == {BASE_LOAD_ID, "engine:1", "engine:2"}


def test_dropped_while_it_is_staged(fresh, adapter, halfway, callers):
    worker, _ = fresh
    staging = callers.submit(worker.stage, load("engine:1", adapter))
    assert halfway.reached.wait(200)
    worker.drop("engine:1")
    halfway.go_on()
    with pytest.raises(EngineError, match="was dropped"):
        staging.result(200)
    assert set(worker.report().loads) == {BASE_LOAD_ID}


def test_closed_while_something_is_staged(fresh, adapter, halfway, callers):
    worker, _ = fresh
    staging = callers.submit(worker.stage, load("engine:1", adapter))
    assert halfway.reached.wait(200)
    worker.close()
    with pytest.raises(EngineError, match="closed"):
        staging.result(200)


def test_a_broken_engine_stages_nothing(fresh, adapter, halfway, callers, monkeypatch):
    worker, path = fresh
    staging = callers.submit(worker.stage, load("engine:1", adapter))
    assert halfway.reached.wait(200)
    fail_steps(monkeypatch, 1, EngineUncertain("half a write"))

    async def body():
        async with client(path) as handler:
            await Reader().read(handler, ask())

    run(body())
    with pytest.raises(EngineUncertain, match="half a write"):
        staging.result(200)
    with pytest.raises(EngineUncertain, match="half a write"):
        worker.score(BASE_LOAD_ID, IDS)


def test_a_disk_that_stalls_delays_nobody(fresh, adapter, callers, tmp_path):
    worker, path = fresh
    shutil.copytree(adapter, tmp_path / "slow")
    (tmp_path / "slow" / "adapter_model.safetensors").unlink()
    os.mkfifo(tmp_path / "slow" / "adapter_model.safetensors")  # nothing comes until somebody writes
    staging = callers.submit(worker.stage, load("engine:1", tmp_path / "slow"))

    async def body():
        async with client(path) as handler:
            assert len((await Reader().read(handler, ask(max_tokens=60))).tokens) == 60

    run(body())
    assert not staging.done()
    writer = os.open(tmp_path / "slow" / "adapter_model.safetensors", os.O_WRONLY)
    (tmp_path / "slow" / "adapter_model.safetensors").rename(tmp_path / "pipe")
    shutil.copy(adapter / "adapter_model.safetensors", tmp_path / "slow")
    os.close(writer)
    staging.result(200)
    assert "engine:1" in worker.report().loads
