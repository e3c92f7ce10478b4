"""Real engines in processes of their own, and how the backend reports what fails on some of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from reef.errors import BarrierError, EngineError, EngineUncertain, Unavailable, WorkerDied
from reef.inference.local.backend import LocalBackend
from reef.inference.local.client import LocalHandler
from reef.runtime.executor import make_executor
from reef.runtime.interfaces import BASE_LOAD_ID, Ending, EngineReport, MemoryRegion, PauseMode, WeightKind, WeightLoad
from tests.inference.engines import Reader, ask, control, other_weights, run, tiny_config

LOAD = WeightLoad(runtime_load_id="engine:1", content_id="c1", kind=WeightKind.FULL, path="/some/where")


# ---------------------------------------------------------------------------------------------- real processes


class Recorder:
    """An executor factory that remembers what it made, so that a test can reach the processes."""

    def __init__(self, **settings) -> None:
        self.executors = []
        self._settings = settings

    def __call__(self, worker_class, kwargs_per_rank):
        env = [{"OMP_NUM_THREADS": "1"}] * len(kwargs_per_rank)
        made = make_executor("mp", worker_class, kwargs_per_rank, name="engine", env_per_rank=env, **self._settings)
        self.executors.append(made)
        return made

    @property
    def pids(self):
        return self.executors[-1].pids


@pytest.fixture(scope="module")
def pair(tiny_model):
    """Two replicas. Tests may kill them and must leave them restarted."""
    recorder = Recorder()
    backend = LocalBackend(tiny_config(tiny_model, engines=2), recorder, base_content_id="base")
    backend.start()
    yield backend, recorder
    backend.close()


@contextlib.asynccontextmanager
async def client(backend):
    handler = LocalHandler(backend.endpoints)
    await handler.connect()
    yield handler
    await handler.close()


def test_two_replicas_share_the_load_and_agree(pair):
    backend, _ = pair

    async def body():
        async with client(backend) as handler:
            readers = [Reader() for _ in range(8)]
            tasks = [asyncio.ensure_future(r.read(handler, ask(n, max_tokens=400))) for n, r in enumerate(readers)]
            await asyncio.gather(*(reader.has(3) for reader in readers))
            assert [report.running + report.waiting for report in await control(backend.reports)] == [4, 4]
            await asyncio.gather(*tasks)
            once = await asyncio.gather(*(Reader().read(handler, ask(0, max_tokens=40)) for _ in range(2)))
            assert once[0].tokens == once[1].tokens == readers[0].tokens[:40]

    run(body())
    assert backend.probe_tolerance == 1e-3
    assert [report.engine for report in backend.reports()] == ["engine-0", "engine-1"]
    assert backend.health() is None


def test_each_engine_acknowledges_its_memory(pair):
    backend, _ = pair
    backend.pause(PauseMode.RETRACT)
    released = backend.release_memory([MemoryRegion.KV_CACHE, MemoryRegion.WEIGHTS])
    assert [(one.owner, len(one.released)) for one in released] == [("engine-0", 2), ("engine-1", 2)]
    assert [one.released for one in backend.restore_memory()] == [[], []]
    for load in {load for report in backend.reports() for load in report.lanes.values()} - {BASE_LOAD_ID}:
        backend.stage(WeightLoad(runtime_load_id=load, content_id="base", kind=WeightKind.FULL, path=None))
    backend.resume()


def test_a_publication_reaches_every_replica(pair, tiny_model, tmp_path):
    backend, _ = pair
    weights = str(other_weights(tiny_model, tmp_path / "other"))
    backend.stage(WeightLoad(runtime_load_id="engine:1", content_id="c1", kind=WeightKind.FULL, path=weights))
    first, second = backend.score("engine:1", list(range(40, 56)))
    assert len(first) == 15 and first == second != backend.score(BASE_LOAD_ID, list(range(40, 56)))[0]

    async def body():
        async with client(backend) as handler:
            readers = [Reader() for _ in range(4)]
            tasks = [
                asyncio.ensure_future(r.read(handler, ask(n, max_tokens=300, lane="shop")))
                for n, r in enumerate(readers)
            ]
            await asyncio.gather(*(reader.has(3) for reader in readers))
            await control(backend.pause, PauseMode.RETRACT)
            await control(backend.activate, "shop", "engine:1")
            await control(backend.resume)
            await asyncio.gather(*tasks)
            assert [reader.loads for reader in readers] == [[BASE_LOAD_ID, "engine:1"]] * 4

    run(body())
    for report in backend.reports():
        assert report.lanes["shop"] == "engine:1" and report.loads == {BASE_LOAD_ID: "base", "engine:1": "c1"}
    backend.pause(PauseMode.IN_PLACE)
    backend.activate("shop", BASE_LOAD_ID)
    backend.resume()
    backend.drop("engine:1")
    backend.drop("engine:1")


def test_a_stage_that_fails_everywhere_changes_nothing(pair):
    backend, _ = pair
    with pytest.raises(EngineError, match=r"stage failed on engine-0: .*; engine-1: ") as caught:
        backend.stage(LOAD)
    assert type(caught.value) is EngineError
    assert all("engine:1" not in report.loads for report in backend.reports())


def test_an_engine_that_is_killed_while_it_stages(pair, tiny_model, tmp_path):
    backend, recorder = pair
    weights = other_weights(tiny_model, tmp_path / "other")
    slow = shutil.copytree(weights, tmp_path / "slow")
    (slow / "model.safetensors").unlink()
    os.mkfifo(slow / "model.safetensors")  # both engines wait for what it says
    load = WeightLoad(runtime_load_id="engine:1", content_id="c1", kind=WeightKind.FULL, path=str(slow))
    with ThreadPoolExecutor(1) as caller:
        staging = caller.submit(backend.stage, load)
        writer = open_for_writing(slow / "model.safetensors")
        (slow / "model.safetensors").rename(tmp_path / "pipe")  # the other engine then finds no weights
        os.kill(recorder.pids[1], signal.SIGKILL)
        os.close(writer)
        with pytest.raises(WorkerDied, match=r"engine-1 .* signal 9"):
            staging.result(60)
    backend.restart()
    backend.stage(WeightLoad(runtime_load_id="engine:1", content_id="c1", kind=WeightKind.FULL, path=str(weights)))
    assert all(report.loads == {BASE_LOAD_ID: "base", "engine:1": "c1"} for report in backend.reports())
    backend.drop("engine:1")
    backend.resume()


def open_for_writing(pipe: Path) -> int:
    """Wait until somebody reads from it."""
    deadline = time.monotonic() + 200
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_killed_engine_cuts_its_streams_and_a_restart_serves_again(pair):
    backend, recorder = pair

    async def body():
        async with client(backend) as handler:
            paths = backend.endpoints()
            readers = [Reader() for _ in range(4)]
            tasks = [asyncio.ensure_future(r.read(handler, ask(n, max_tokens=400))) for n, r in enumerate(readers)]
            await asyncio.gather(*(reader.has(3) for reader in readers))
            os.kill(recorder.pids[1], signal.SIGKILL)
            await asyncio.gather(*tasks)
            endings = [reader.chunks[-1].ending for reader in readers]
            assert sorted(endings) == [Ending.ENGINE_CUT] * 2 + [Ending.LENGTH] * 2
            cut = readers[endings.index(Ending.ENGINE_CUT)].chunks[-1]
            assert "was lost" in cut.error and cut.runtime_load_id == BASE_LOAD_ID
            assert len((await Reader().read(handler, ask())).tokens) == 8  # the other one serves
            assert "signal 9" in backend.health()
            with pytest.raises(WorkerDied, match=r"engine-1: engine-1 \(pid \d+\) was ended by signal 9"):
                await control(backend.reports)
            with pytest.raises(BarrierError, match="signal 9"):
                await control(backend.pause, PauseMode.RETRACT)
            old = recorder.pids
            await control(backend.restart)
            assert backend.endpoints() == paths and not set(old) & set(recorder.pids)
            with pytest.raises(Unavailable):
                await anext(handler.generate(ask()))
            await handler.connect()
            waiting = [asyncio.ensure_future(Reader().read(handler, ask(n))) for n in range(4)]
            await asyncio.sleep(0.2)
            assert not any(task.done() for task in waiting)
            for report in await control(backend.reports):
                assert report.paused and report.loads == {BASE_LOAD_ID: "base"} and report.waiting + report.running == 2
            await control(backend.resume)
            assert all(len(reader.tokens) == 8 for reader in await asyncio.gather(*waiting))

    run(body(), 100)
    assert backend.health() is None


def test_a_start_can_be_called_off(tiny_model):
    recorder = Recorder()
    backend = LocalBackend(tiny_config(tiny_model), recorder)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(backend.start)
        while not recorder.executors:
            time.sleep(0.01)
        backend.close()
        with pytest.raises(WorkerDied, match=r"ended by signal (15|9)"):  # 9 where it is too busy to hear of 15
            starting.result(100)
    assert not os.path.exists(f"/proc/{recorder.pids[0]}")


def test_the_sockets_are_private(pair):
    backend, _ = pair
    directory = Path(backend.endpoints()[0]).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert len(backend.endpoints()[0]) < 100


OWNER = """
import sys, time
from pathlib import Path
from tests.inference.engines import tiny_config
from tests.inference.test_backend import Recorder
from reef.inference.local.backend import LocalBackend
recorder = Recorder()
backend = LocalBackend(tiny_config(Path(sys.argv[1])), recorder)
backend.start()
print(recorder.pids[0], backend.endpoints()[0], flush=True)
time.sleep(600)
"""


def test_an_engine_dies_with_its_owner_even_while_it_generates(tiny_model):
    with subprocess.Popen([sys.executable, "-c", OWNER, tiny_model], stdout=subprocess.PIPE, text=True) as owner:
        pid, path = owner.stdout.readline().split()

        async def body():
            handler = LocalHandler(lambda: [path])
            await handler.connect()
            reader = Reader()
            task = asyncio.ensure_future(reader.read(handler, ask(max_tokens=3500)))
            await reader.has(3)
            owner.kill()
            await task
            assert reader.chunks[-1].ending is Ending.ENGINE_CUT

        run(body())
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}/cmdline") and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    shutil.rmtree(os.path.dirname(path))  # the socket may be gone already: an engine that had the time removed it


def test_a_model_that_is_not_there_fails_the_start(tmp_path):
    backend = LocalBackend(tiny_config(tmp_path / "nowhere"), Recorder())
    with pytest.raises(EngineError, match="never started"):
        _ = backend.probe_tolerance
    with pytest.raises(WorkerDied, match=r"engine-0 could not start: .*nowhere"):
        backend.start()
    backend.close()


# ---------------------------------------------------------------------------------------------- faults on some engines


class FakeEngineWorker:
    """Answers as its `faults` say: {method: "error" | "uncertain" | "foreign" | "hang"}; notes what was called."""

    faults: ClassVar[tuple[dict[str, str], ...]] = ()
    calls: ClassVar[list[str]] = []
    end: ClassVar[threading.Event] = threading.Event()

    def __init__(self, *, name, listen, **_):
        self.name, self.listen = name, listen
        self.mine = dict(FakeEngineWorker.faults[int(name[-1])])

    def __getattr__(self, method):
        return partial(self._answer, method)

    def close(self):
        pass

    def _answer(self, method, *_):
        FakeEngineWorker.calls.append(f"{self.name}.{method}")
        match self.mine.get(method):
            case "error":
                raise EngineError("no room")
            case "uncertain":
                raise EngineUncertain("half done")
            case "foreign":
                raise KeyError("surprise")
            case "hang":
                FakeEngineWorker.end.wait(600)
        if method == "report":
            return EngineReport(
                engine=self.name, lanes={}, loads={}, paused=False, free_pages=0, total_pages=0, running=0, waiting=0
            )
        return {"health": self.mine.get("sick"), "dtype": "float32", "endpoint": self.listen}.get(method)


@pytest.fixture
def faulty(tmp_path):
    """Returns a function: one fault table per engine -> a started backend."""
    started = []
    FakeEngineWorker.end = threading.Event()

    def start(*faults, **settings):
        FakeEngineWorker.faults, FakeEngineWorker.calls = faults, []

        def factory(_, kwargs_per_rank):
            return make_executor("uni", "tests.inference.test_backend:FakeEngineWorker", kwargs_per_rank)

        backend = LocalBackend(tiny_config(tmp_path, engines=len(faults)), factory)
        backend.start()
        backend._config = msgspec.structs.replace(backend._config, **settings)  # a short timeout is not for the start
        started.append(backend)
        return backend

    yield start
    FakeEngineWorker.end.set()
    for backend in started:
        backend.close()


@pytest.mark.parametrize("method", ["pause", "flush"])
@pytest.mark.parametrize("fault", ["error", "uncertain", "foreign", "hang"])
def test_a_barrier_that_does_not_hold_on_one_engine_fails(faulty, method, fault):
    backend = faulty({}, {method: fault}, control_timeout=0.2)
    with pytest.raises(BarrierError, match="engine-1"):
        getattr(backend, method)(*([PauseMode.RETRACT] if method == "pause" else []))


def test_a_stage_that_fails_on_one_engine_is_undone_on_the_others(faulty):
    backend = faulty({}, {"stage": "error"})
    with pytest.raises(EngineError, match="stage failed on engine-1: no room") as caught:
        backend.stage(LOAD)
    assert type(caught.value) is EngineError
    assert "engine-0.drop" in FakeEngineWorker.calls


def test_a_stage_that_cannot_be_undone_is_uncertain(faulty):
    backend = faulty({"drop": "error"}, {"stage": "error"})
    with pytest.raises(EngineUncertain, match=r"no room.*undoing it on the others failed: drop failed on engine-0"):
        backend.stage(LOAD)


@pytest.mark.parametrize("fault", ["uncertain", "hang"])
def test_a_stage_of_unknown_outcome_is_uncertain_and_not_touched(faulty, fault):
    backend = faulty({}, {"stage": fault}, control_timeout=0.2)
    with pytest.raises(EngineUncertain, match="engine-1"):
        backend.stage(LOAD)
    assert "engine-0.drop" not in FakeEngineWorker.calls


def test_what_only_some_engines_did_is_uncertain(faulty):
    backend = faulty({}, {"activate": "error"})
    with pytest.raises(EngineUncertain, match="other engines did it"):
        backend.activate("shop", "engine:1")
    nowhere = faulty({"activate": "error"}, {"activate": "error"})
    with pytest.raises(EngineError) as caught:
        nowhere.activate("shop", "engine:1")
    assert type(caught.value) is EngineError


@pytest.mark.parametrize("fault", ["error", "uncertain", "foreign", "hang"])
@pytest.mark.parametrize("method", ["release_memory", "restore_memory"])
def test_a_memory_operation_that_fails_on_one_engine_or_all_is_uncertain(faulty, method, fault):
    arguments = [[MemoryRegion.KV_CACHE]] if method == "release_memory" else []
    for faults in ([{}, {method: fault}], [{method: fault}] * 2):
        with pytest.raises(EngineUncertain, match="engine-1"):
            getattr(faulty(*faults, control_timeout=0.2), method)(*arguments)


def test_what_can_be_asked_again_is_a_plain_error(faulty):
    backend = faulty({}, {"resume": "error", "drop": "error", "score": "foreign", "report": "error"})
    for call in (backend.resume, partial(backend.drop, "x"), partial(backend.score, "x", [1, 2]), backend.reports):
        with pytest.raises(EngineError, match="engine-1") as caught:
            call()
        assert type(caught.value) is EngineError


def test_the_deadline_is_shared(faulty, monkeypatch):
    backend = faulty(*[{"resume": "hang"}] * 4, control_timeout=0.3)
    deadlines, real = [], backend._outcome
    monkeypatch.setattr(backend, "_outcome", lambda *asked: deadlines.append(asked[-1]) or real(*asked))
    with pytest.raises(EngineUncertain, match=r"engine-0: no answer within 0.3 s; .*engine-3: no answer"):
        backend.resume()
    assert len(deadlines) == 4 and len(set(deadlines)) == 1


def test_health_never_blocks_and_tells_what_the_engine_says(faulty):
    backend = faulty({}, {"sick": "broken: bad kernel"})
    while (reason := backend.health()) is None:
        time.sleep(0.01)
    assert reason == "engine-1: broken: bad kernel"
    silent = faulty({"health": "hang"})
    assert silent.health() is None and silent.health() is None


def test_before_the_start_and_after_the_end(faulty):
    backend = faulty({})
    backend.close()
    assert backend.health() == "the engines are not started" and backend.endpoints() == []
    with pytest.raises(EngineError, match="not started"):
        backend.reports()
    backend.close()
