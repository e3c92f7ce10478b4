"""One real engine behind its socket, driven by the real client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import threading
import time

import pytest

from reef.errors import EngineError, EngineUncertain, InvalidRequest, Unavailable
from reef.inference.local.client import HandlerOptions, LocalHandler
from reef.inference.local.engine import LocalEngine
from reef.inference.local.protocol import Add, encode
from reef.inference.local.worker import EngineWorker, _StepLoop
from reef.runtime.interfaces import (
    BASE_LOAD_ID,
    Ending,
    GenerateRequest,
    MemoryRegion,
    PauseMode,
    SamplingParams,
    WeightKind,
    WeightLoad,
)
from tests.inference.engines import Brake, Reader, ask, control, other_weights, run, tiny_config

BOTH = pytest.mark.parametrize("mode", list(PauseMode))


@pytest.fixture(scope="module")
def shared(tiny_model):
    directory = tempfile.mkdtemp(prefix="reef-test-")
    worker = EngineWorker(config=tiny_config(tiny_model), name="engine-0", listen=f"{directory}/engine-0")
    yield worker, f"{directory}/engine-0"
    worker.close()
    shutil.rmtree(directory)


@pytest.fixture
def worker(shared):
    worker, _ = shared
    yield worker
    worker.resume()
    assert idle(worker)


@pytest.fixture
def path(shared, worker):
    return shared[1]


@pytest.fixture
def fresh(tiny_model):
    """Returns worker and socket path of an engine that the test may break."""
    directory = tempfile.mkdtemp(prefix="reef-test-")
    worker = EngineWorker(config=tiny_config(tiny_model), name="engine-0", listen=f"{directory}/engine-0")
    yield worker, f"{directory}/engine-0"
    worker.close()
    shutil.rmtree(directory)


@contextlib.asynccontextmanager
async def client(path: str, **settings):
    handler = LocalHandler(lambda: [path], HandlerOptions(**settings))
    await handler.connect()
    yield handler
    await handler.close()


def idle(worker: EngineWorker, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while (report := worker.report()).running + report.waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    return report.running + report.waiting == 0


def test_a_stream_carries_every_token_and_its_load(path):
    async def body():
        async with client(path) as handler:
            reader = await Reader().read(handler, ask(max_tokens=20))
            assert len(reader.tokens) == 20 and reader.loads == [BASE_LOAD_ID]
            assert [chunk.ending for chunk in reader.chunks if chunk.ending] == [Ending.LENGTH]
            assert {chunk.request_id for chunk in reader.chunks} == {"request-0"}
            assert handler.max_context > 1000

    run(body())


def test_sixty_four_at_once_equal_one_at_a_time(path):
    async def body():
        async with client(path) as handler:
            alone = [(await Reader().read(handler, ask(n, max_tokens=6))).tokens for n in range(0, 64, 8)]
            together = await asyncio.gather(*(Reader().read(handler, ask(n, max_tokens=6)) for n in range(64)))
            assert [reader.tokens for reader in together[::8]] == alone
            assert len({tuple(reader.tokens) for reader in together}) > 8

    run(body())


def test_a_bad_request_is_refused_before_the_first_chunk(path):
    async def body():
        async with client(path) as handler:
            too_long = GenerateRequest(request_id="r", prompt_ids=[1] * 100_000, sampling=SamplingParams())
            with pytest.raises(InvalidRequest) as caught:
                await anext(handler.generate(too_long))
            assert caught.value.field
            assert (await Reader().read(handler, ask())).chunks[-1].ending is Ending.LENGTH

    run(body())


def test_closing_the_iterator_aborts_in_the_engine(path, worker):
    async def body():
        async with client(path) as handler:
            before = (await control(worker.report)).stats["output_tokens"]
            stream = handler.generate(ask(max_tokens=3500))
            await anext(stream)
            assert (await control(worker.report)).running == 1
            await stream.aclose()
            assert await control(idle, worker)
            assert (await control(worker.report)).stats["output_tokens"] < before + 3500, "it went on for nobody"

    run(body())


def test_a_client_that_is_gone_leaves_no_request(path, worker):
    async def body():
        async with client(path) as handler:
            readers = [Reader() for _ in range(3)]
            tasks = [asyncio.ensure_future(r.read(handler, ask(n, max_tokens=3500))) for n, r in enumerate(readers)]
            await asyncio.gather(*(reader.has(2) for reader in readers))
        ended = await asyncio.gather(*tasks)
        assert {reader.chunks[-1].ending for reader in ended} == {Ending.ENGINE_CUT}
        assert await control(idle, worker)

    run(body())


@pytest.fixture
def brake(worker, monkeypatch):
    found = Brake(monkeypatch, worker.report)
    yield found
    found.lift()


@BOTH
def test_a_pause_is_a_barrier_under_traffic(path, worker, mode, brake):
    async def body():
        async with client(path) as handler:
            expected = await asyncio.gather(*(Reader().read(handler, ask(n, max_tokens=150)) for n in range(6)))
            readers = [Reader() for _ in range(6)]
            brake.hold(6 * 100)
            tasks = [asyncio.ensure_future(r.read(handler, ask(n, max_tokens=150))) for n, r in enumerate(readers)]
            for goal in (10, 60):
                await asyncio.gather(*(reader.has(goal) for reader in readers))
                await control(worker.pause, mode)
                brake.lift()
                before = (await control(worker.report)).stats["output_tokens"]
                late = asyncio.ensure_future(Reader().read(handler, ask(99, max_tokens=3)))
                await asyncio.sleep(0.2)
                while (report := await control(worker.report)).running + report.waiting < 7:
                    await asyncio.sleep(0.01)
                assert report.paused and report.stats["output_tokens"] == before and not late.done()
                brake.hold(6 * 50)
                await control(worker.resume)
                assert len((await late).tokens) == 3
            brake.lift()
            await asyncio.gather(*tasks)
            assert [reader.tokens for reader in readers] == [reader.tokens for reader in expected]

    run(body())


def test_a_pause_waits_for_the_step_in_progress(path, worker, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()
    real, steps = LocalEngine.step, itertools.count(1)

    def second_waits(self):
        if next(steps) == 2:
            inside.set()
            assert go_on.wait(200)
        return real(self)

    async def body():
        async with client(path) as handler:
            monkeypatch.setattr(LocalEngine, "step", second_waits)
            before = (await control(worker.report)).stats["output_tokens"]
            task = asyncio.ensure_future(Reader().read(handler, ask(max_tokens=4)))
            await control(inside.wait)
            pausing = asyncio.ensure_future(control(worker.pause, PauseMode.IN_PLACE))
            await asyncio.sleep(0.1)
            assert not pausing.done()
            go_on.set()
            await pausing
            await asyncio.sleep(0.1)
            assert (await control(worker.report)).stats["output_tokens"] == before + 2
            await control(worker.resume)
            assert len((await task).tokens) == 4

    run(body())


@BOTH
def test_activation_switches_the_span_in_mid_stream(path, worker, tiny_model, tmp_path, mode, brake):
    load = WeightLoad(
        runtime_load_id=f"engine:{mode}",
        content_id="other",
        kind=WeightKind.FULL,
        path=str(other_weights(tiny_model, tmp_path / "other")),
    )

    async def body():
        async with client(path) as handler:
            base = await Reader().read(handler, ask(max_tokens=120, lane="shop"))
            reader = Reader()
            brake.hold(60)
            task = asyncio.ensure_future(reader.read(handler, ask(max_tokens=120, lane="shop")))
            await control(worker.stage, load)
            await reader.has(5)
            await control(worker.pause, mode)
            await control(worker.activate, "shop", load.runtime_load_id)
            brake.lift()
            await control(worker.resume)
            await task
            assert reader.loads == [BASE_LOAD_ID, load.runtime_load_id]
            first = sum(len(c.token_ids) for c in reader.chunks if c.runtime_load_id == BASE_LOAD_ID)
            assert reader.tokens[:first] == base.tokens[:first] and reader.tokens != base.tokens
            assert (await Reader().read(handler, ask(lane="shop"))).loads == [load.runtime_load_id]
            assert (await Reader().read(handler, ask())).loads == [BASE_LOAD_ID]

    run(body())
    report = worker.report()
    assert report.lanes["shop"] == load.runtime_load_id and report.loads[load.runtime_load_id] == "other"
    worker.pause(mode)
    worker.activate("shop", BASE_LOAD_ID)
    worker.drop(load.runtime_load_id)


def test_a_staged_load_scores_and_serves_only_who_pins_it(path, worker, tiny_model, tmp_path):
    weights = str(other_weights(tiny_model, tmp_path / "other"))
    worker.stage(WeightLoad(runtime_load_id="engine:7", content_id="c7", kind=WeightKind.FULL, path=weights))
    ids = list(range(50, 66))
    assert len(worker.score("engine:7", ids)) == 15
    assert worker.score("engine:7", ids) != worker.score(BASE_LOAD_ID, ids)

    async def body():
        async with client(path) as handler:
            pinned = ask()
            pinned.runtime_load_id = "engine:7"
            assert (await Reader().read(handler, pinned)).loads == ["engine:7"]
            assert (await Reader().read(handler, ask())).loads == [BASE_LOAD_ID]

    run(body())
    worker.drop("engine:7")
    assert "engine:7" not in worker.report().loads


def test_control_errors_come_back(worker):
    with pytest.raises(EngineError, match="there is no directory"):
        worker.stage(
            WeightLoad(runtime_load_id="engine:8", content_id="c", kind=WeightKind.FULL, path="/nowhere/to/be/found")
        )
    with pytest.raises(EngineError):
        worker.activate("shop", "engine:never")
    assert worker.health() is None


def test_a_slow_reader_gets_everything_and_delays_nobody(path):
    async def body():
        async with client(path) as handler:
            alone = await Reader().read(handler, ask(1, max_tokens=100))
            others_are_done, tokens = asyncio.Event(), []

            async def slow():
                async for chunk in handler.generate(ask(1, max_tokens=100)):
                    tokens.extend(chunk.token_ids)
                    await others_are_done.wait()

            reading = asyncio.ensure_future(slow())
            assert len((await Reader().read(handler, ask(2, max_tokens=100))).tokens) == 100
            assert len(tokens) < 100
            others_are_done.set()
            await reading
            assert tokens == alone.tokens

    run(body())


def test_an_idle_engine_sleeps(path, worker, monkeypatch):
    rounds, real = itertools.count(), _StepLoop._can_step

    def counted(loop):
        next(rounds)
        return real(loop)

    monkeypatch.setattr(_StepLoop, "_can_step", counted)

    async def sleeps() -> bool:
        await control(worker.report)  # it may still have to find that there is nothing to do
        before = next(rounds)
        await asyncio.sleep(0.3)
        return next(rounds) - before < 10

    async def body():
        async with client(path) as handler:
            await Reader().read(handler, ask())
            assert await sleeps()
            await control(worker.pause, PauseMode.IN_PLACE)
            waiting = asyncio.ensure_future(Reader().read(handler, ask()))
            await asyncio.sleep(0.05)
            assert await sleeps()
            await control(worker.resume)
            await waiting

    run(body())


def test_a_client_that_never_reads_is_dropped(path, worker, monkeypatch):
    monkeypatch.setattr("reef.inference.local.worker._MAX_UNSENT_BYTES", 50_000)

    async def body():
        async with client(path) as handler:
            _, writer = await asyncio.open_unix_connection(path, limit=1000)
            for n in range(64):
                writer.write(encode(Add(ask(n, max_tokens=1000))))
            await asyncio.sleep(0)
            assert await control(idle, worker)
            writer.close()
            assert len((await Reader().read(handler, ask())).tokens) == 8

    run(body())


def test_an_abort_is_heard_while_paused(path, worker):
    async def body():
        async with client(path) as handler:
            stream = handler.generate(ask(max_tokens=500))
            await anext(stream)
            await control(worker.pause, PauseMode.IN_PLACE)
            await stream.aclose()
            assert await control(idle, worker)
            report = await control(worker.report)
            assert report.free_pages + report.stats["cached_pages"] == report.total_pages

    run(body())


def fail_steps(monkeypatch, count: int, error: Exception) -> None:
    """The next `count` steps that have work raise."""
    real = LocalEngine.step
    left = [count]

    def step(self):
        if left[0] > 0:
            left[0] -= 1
            raise error
        return real(self)

    monkeypatch.setattr(LocalEngine, "step", step)


def test_a_failed_step_cuts_its_requests_and_serving_goes_on(fresh, monkeypatch):
    worker, path = fresh

    async def body():
        async with client(path) as handler:
            reader = Reader()
            task = asyncio.ensure_future(reader.read(handler, ask(max_tokens=3500)))
            await reader.has(3)
            fail_steps(monkeypatch, 1, RuntimeError("bad kernel"))
            await task
            assert reader.chunks[-1].ending is Ending.ENGINE_CUT
            assert "RuntimeError: bad kernel" in reader.chunks[-1].error
            assert (await Reader().read(handler, ask())).chunks[-1].ending is Ending.LENGTH
            assert worker.health() is None

    run(body())


@pytest.mark.parametrize("error", [RuntimeError("bad kernel"), EngineUncertain("half a write")])
def test_an_engine_that_does_not_recover_says_so(fresh, monkeypatch, error):
    worker, path = fresh
    fail_steps(monkeypatch, 1000, error)

    async def body():
        async with client(path) as handler:
            for n in range(3):
                with contextlib.suppress(Unavailable):
                    assert (await Reader().read(handler, ask(n))).chunks[-1].ending is Ending.ENGINE_CUT
            with pytest.raises(Unavailable, match=str(error)):
                await anext(handler.generate(ask()))

    run(body())
    assert str(error) in worker.health()
    with pytest.raises(EngineUncertain, match=str(error)):
        worker.pause(PauseMode.RETRACT)
    assert worker.report().running == 0


def test_an_engine_that_cannot_even_end_its_requests_still_cuts_them(fresh, monkeypatch):
    worker, path = fresh
    fail_steps(monkeypatch, 1000, RuntimeError("bad kernel"))

    def fail_all(self, reason):
        raise RuntimeError("lost count")

    monkeypatch.setattr(LocalEngine, "fail_all", fail_all)

    async def body():
        async with client(path) as handler:
            reader = await Reader().read(handler, ask())
            assert reader.chunks[-1].ending is Ending.ENGINE_CUT and "bad kernel" in reader.chunks[-1].error

    run(body())
    assert "lost count" in worker.health()


@pytest.mark.parametrize("operation", ["release_memory", "restore_memory"])
def test_an_engine_that_fails_a_memory_operation_is_broken(fresh, monkeypatch, operation):
    worker, _ = fresh

    def fail(self, *_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(LocalEngine, operation, fail)
    worker.pause(PauseMode.RETRACT)
    with pytest.raises(EngineUncertain, match="out of memory"):
        getattr(worker, operation)(*([list(MemoryRegion)] if operation == "release_memory" else []))
    assert "out of memory" in worker.health()
    with pytest.raises(EngineUncertain, match="out of memory"):
        worker.resume()
    assert worker.report().paused


def test_requests_wait_while_memory_is_released(path, worker):
    async def check():
        async with client(path) as handler:
            begun, late = Reader(), Reader()
            reading = [asyncio.create_task(begun.read(handler, ask(1, max_tokens=200)))]
            await begun.has(3)
            await control(worker.pause, PauseMode.RETRACT)
            report = await control(worker.release_memory, [MemoryRegion.WEIGHTS, MemoryRegion.KV_CACHE])
            reading.append(asyncio.create_task(late.read(handler, ask(2))))
            before = (await control(worker.report)).stats["output_tokens"]
            await asyncio.sleep(0.2)
            assert (await control(worker.report)).stats["output_tokens"] == before
            assert not late.chunks and len(report.released) == 2
            restored = await control(worker.restore_memory)
            await control(worker.resume)
            await asyncio.gather(*reading)
            assert restored.released == [] and (len(begun.tokens), len(late.tokens)) == (200, 8)
            assert begun.loads == late.loads == [BASE_LOAD_ID]

    run(check())


def test_garbage_closes_only_its_own_connection(path):
    async def body():
        async with client(path) as handler:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"\x00\x00\x00\x04oops")
            assert len(await reader.read()) > 0  # the greeting, then the end
            writer.close()
            assert (await Reader().read(handler, ask())).chunks[-1].ending is Ending.LENGTH

    run(body())


def test_construction(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="at most 100 bytes"):
        EngineWorker(config=tiny_config(tiny_model), name="e", listen="/" + "x" * 100)
    with pytest.raises(Exception, match="nowhere"):
        EngineWorker(config=tiny_config(tmp_path / "nowhere"), name="e", listen=str(tmp_path / "s"))
    assert not os.path.exists(tmp_path / "s")


def test_a_paused_engine_takes_over_a_dead_ones_socket(tiny_model):
    directory = tempfile.mkdtemp(prefix="reef-test-")
    path = f"{directory}/engine-0"
    with open(path, "w"):
        pass
    worker = EngineWorker(config=tiny_config(tiny_model), name="engine-0", listen=path, paused=True)
    assert worker.report().paused

    async def body():
        async with client(path) as handler:
            waiting = asyncio.ensure_future(Reader().read(handler, ask()))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await control(worker.resume)
            assert len((await waiting).tokens) == 8

    run(body())
    worker.close()
    assert not os.path.exists(path)
    with pytest.raises(EngineError, match="closed"):
        worker.report()
    os.rmdir(directory)
