"""The client against a socket that misbehaves on command; with real engines it is tested in test_worker.py."""

from __future__ import annotations

import asyncio
import gc

import pytest

from reef.errors import InvalidRequest, Unavailable, VerificationError
from reef.inference.local.client import HandlerOptions, LocalHandler
from reef.inference.local.protocol import VERSION, Abort, Add, Chunks, Hello, Rejected, encode, engine_reader
from reef.runtime.interfaces import Ending, GenerateRequest, SamplingParams, TokenChunk


class FakeEngine:
    """Speaks the protocol on a socket and lets the test decide what is sent, and when."""

    def __init__(self, path: str, version: int = VERSION, max_context: int = 100) -> None:
        self.path = path
        self.hello = Hello(version, "fake", max_context)
        self.received: list[Add | Abort] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.order: list[str] = []
        self.wire_ids: dict[str, str] = {}  # the latest for each of the client's

    async def __aenter__(self) -> FakeEngine:
        self.server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for writer in self.writers:
            writer.close()

    async def _serve(self, reader, writer):
        self.writers.append(writer)
        writer.write(encode(self.hello))
        frames = engine_reader()
        while data := await reader.read(65536):
            for message in frames.feed(data):
                if isinstance(message, Add):  # tests use the client's ids; the wire's are kept here
                    plain = message.request.request_id.partition("#")[0]
                    self.order.append(message.request.request_id)
                    self.wire_ids[plain], message.request.request_id = message.request.request_id, plain
                else:
                    message.request_id = message.request_id.partition("#")[0]
                self.received.append(message)
        writer.close()

    async def expect(self, count: int) -> list[Add | Abort]:
        async with asyncio.timeout(60):
            while len(self.received) < count:
                await asyncio.sleep(0.002)
        return self.received

    def send(self, message, connection: int = -1) -> None:
        for part in message.chunks if isinstance(message, Chunks) else [message]:
            part.request_id = self.wire_ids.get(part.request_id, part.request_id)
        self.writers[connection].write(encode(message))


def ask(request_id="r", prompt_ids=(1, 2, 3), lane=""):
    return GenerateRequest(request_id=request_id, prompt_ids=list(prompt_ids), sampling=SamplingParams(), lane=lane)


def piece(request_id="r", token=7, ending=None, load="engine:1"):
    return TokenChunk(
        request_id=request_id,
        token_ids=[token],
        logprobs=[-1.0],
        sampled_logprobs=[-1.0],
        runtime_load_id=load,
        ending=ending,
    )


@pytest.fixture
def path(tmp_path_factory):
    import shutil
    import tempfile

    directory = tempfile.mkdtemp(prefix="reef-test-")
    yield f"{directory}/engine-0"
    shutil.rmtree(directory)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 200))


def with_engine(test):
    """Run `async def test(engine, handler)` with one fake engine and a connected handler."""

    def wrapped(path):
        async def body():
            async with FakeEngine(path) as engine:
                handler = LocalHandler(lambda: [path], HandlerOptions(max_in_flight=3, connect_timeout=60))
                await handler.connect()
                await test(engine, handler)
                await handler.close()

        run(body())

    wrapped.__name__ = test.__name__
    return wrapped


@with_engine
async def test_a_stream_ends_with_its_ending_and_leaves_nothing(engine, handler):
    stream = handler.generate(ask())
    first = asyncio.ensure_future(anext(stream))
    assert await engine.expect(1) == [Add(ask())]
    engine.send(Chunks([piece(token=1), piece("another", token=9), piece(token=2, ending=Ending.STOP)]))
    assert (await first).token_ids == [1]
    assert [chunk.token_ids async for chunk in stream] == [[2]]
    await asyncio.sleep(0.02)
    assert len(engine.received) == 1  # no abort after the end
    assert handler.max_context == 100


@with_engine
async def test_closing_the_iterator_aborts(engine, handler):
    stream = handler.generate(ask())
    first = asyncio.ensure_future(anext(stream))
    await engine.expect(1)
    engine.send(Chunks([piece()]))
    await first
    await stream.aclose()
    assert (await engine.expect(2))[1] == Abort("r")
    again = asyncio.ensure_future(anext(handler.generate(ask())))
    old = engine.wire_ids["r"]
    await engine.expect(3)
    engine.send(Chunks([piece(old, token=8), piece(token=3, ending=Ending.LENGTH)]))  # the first was on its way
    assert (await again).token_ids == [3]


@with_engine
async def test_cancelling_the_reader_aborts(engine, handler):
    reader = asyncio.ensure_future(anext(handler.generate(ask())))
    await engine.expect(1)
    reader.cancel()
    assert (await engine.expect(2))[1] == Abort("r")


@with_engine
async def test_forgetting_the_iterator_aborts(engine, handler):
    stream = handler.generate(ask())
    first = asyncio.ensure_future(anext(stream))
    await engine.expect(1)
    engine.send(Chunks([piece()]))
    await first
    del stream, first
    gc.collect()
    assert (await engine.expect(2))[1] == Abort("r")


@with_engine
async def test_refusals(engine, handler):
    reader = asyncio.ensure_future(anext(handler.generate(ask())))
    await engine.expect(1)
    engine.send(Rejected("r", "too long", True, "prompt_ids"))
    with pytest.raises(InvalidRequest, match="too long") as caught:
        await reader
    assert caught.value.field == "prompt_ids"
    reader = asyncio.ensure_future(anext(handler.generate(ask())))
    await engine.expect(2)
    engine.send(Rejected("r", "broken", False))
    with pytest.raises(Unavailable, match="broken"):
        await reader


@with_engine
async def test_the_same_id_may_be_in_flight_twice(engine, handler):
    readers = [asyncio.ensure_future(anext(handler.generate(ask()))) for _ in range(2)]
    await engine.expect(2)
    first, second = engine.order
    engine.send(Chunks([piece(second, token=2, ending=Ending.STOP), piece(first, token=1, ending=Ending.STOP)]))
    chunks = await asyncio.gather(*readers)
    assert [(chunk.request_id, chunk.token_ids) for chunk in chunks] == [("r", [1]), ("r", [2])]


@with_engine
async def test_a_lost_connection_cuts_every_stream_and_is_unavailable_after(engine, handler):
    begun, waiting = handler.generate(ask("begun")), handler.generate(ask("waiting"))
    readers = [asyncio.ensure_future(anext(stream)) for stream in (begun, waiting)]
    await engine.expect(2)
    engine.send(Chunks([piece("begun", load="engine:5")]))
    await readers[0]
    engine.writers[0].transport.abort()
    last = await anext(begun)
    assert (last.ending, last.runtime_load_id, last.token_ids) == (Ending.ENGINE_CUT, "engine:5", [])
    assert f"the connection to the engine at {engine.path} was lost" in last.error
    assert (await readers[1]).ending is Ending.ENGINE_CUT
    assert [chunk async for chunk in begun] == []
    with pytest.raises(Unavailable, match="no engine is connected"):
        await anext(handler.generate(ask()))
    await handler.connect()
    reader = asyncio.ensure_future(anext(handler.generate(ask())))
    await engine.expect(3)
    engine.send(Chunks([piece(ending=Ending.STOP)]))
    assert (await reader).ending is Ending.STOP


@with_engine
async def test_garbage_from_the_engine_cuts(engine, handler):
    reader = asyncio.ensure_future(anext(handler.generate(ask())))
    await engine.expect(1)
    engine.writers[0].write(b"\x00\x00\x00\x02hi")
    assert "not this protocol" in (await reader).error


@with_engine
async def test_in_flight_is_bounded_also_by_what_slow_readers_hold(engine, handler):
    streams = [handler.generate(ask(f"r{n}")) for n in range(3)]
    readers = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await engine.expect(3)
    engine.send(Chunks([piece(f"r{n}", ending=Ending.STOP if n else None) for n in range(3)]))
    await asyncio.gather(*readers)
    with pytest.raises(Unavailable, match="3 requests are in flight, the most that is allowed"):
        await anext(handler.generate(ask("r3")))
    await streams[0].aclose()
    reader = asyncio.ensure_future(anext(handler.generate(ask("r3"))))
    assert (await engine.expect(5))[-1] == Add(ask("r3"))
    reader.cancel()


@with_engine
async def test_a_request_that_waits_too_long_for_its_first_token_is_unavailable(engine, handler):
    handler = LocalHandler(lambda: [engine.path], HandlerOptions(queue_timeout=0.05))
    await handler.connect()
    with pytest.raises(Unavailable, match=r"within 0.05 s") as caught:
        await anext(handler.generate(ask()))
    assert caught.value.retry_after > 1.0
    assert isinstance((await engine.expect(2))[1], Abort), "the engine must not generate for nobody"
    stream = handler.generate(ask("b"))
    first = asyncio.create_task(anext(stream))
    await engine.expect(3)
    engine.send(Chunks([piece("b")]))
    await first
    second = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.15)
    assert not second.done(), "what has begun waits as long as it takes"
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await handler.close()


@with_engine
async def test_connecting_again_lets_older_streams_end(engine, handler):
    old = handler.generate(ask("old"))
    first = asyncio.ensure_future(anext(old))
    await engine.expect(1)
    await handler.connect()
    new = asyncio.ensure_future(anext(handler.generate(ask("new"))))
    await engine.expect(2)
    engine.send(Chunks([piece("new", ending=Ending.STOP)]), connection=1)
    engine.send(Chunks([piece("old", ending=Ending.STOP)]), connection=0)
    assert (await first).ending is Ending.STOP and (await new).ending is Ending.STOP
    await asyncio.sleep(0.05)
    assert [writer.is_closing() for writer in engine.writers] == [True, False]


def test_never_connected(path):
    async def body():
        handler = LocalHandler(lambda: [path], HandlerOptions(connect_timeout=0.3))
        with pytest.raises(Unavailable, match="no engine is connected"):
            await anext(handler.generate(ask()))
        with pytest.raises(Unavailable, match="never connected"):
            _ = handler.max_context
        with pytest.raises(Unavailable, match=f"no engine at {path} within 0.3 s"):
            await handler.connect()
        with pytest.raises(Unavailable, match="no engine is started"):
            await LocalHandler(list).connect()

    run(body())


def test_connect_waits_for_an_engine_that_is_starting(path):
    async def body():
        handler = LocalHandler(lambda: [path], HandlerOptions(connect_timeout=60))
        connecting = asyncio.ensure_future(handler.connect())
        await asyncio.sleep(0.15)
        async with FakeEngine(path):
            await connecting
            await handler.close()

    run(body())


def test_another_protocol_version_is_refused(path):
    async def body():
        async with FakeEngine(path, version=VERSION + 1):
            with pytest.raises(VerificationError, match=f"speaks protocol {VERSION + 1}"):
                await LocalHandler(lambda: [path]).connect()

    run(body())


def test_routing_prefers_the_least_loaded_and_then_the_known_prefix(path):
    paths = [path, f"{path}b"]

    async def body():
        async with FakeEngine(paths[0]) as first, FakeEngine(paths[1], max_context=50) as second:
            handler = LocalHandler(lambda: paths)
            await handler.connect()
            assert handler.max_context == 50
            open_streams = []

            async def send(name, prompt):
                total = len(first.received) + len(second.received)
                open_streams.append(asyncio.ensure_future(anext(handler.generate(ask(name, prompt)))))
                while len(first.received) + len(second.received) == total:
                    await asyncio.sleep(0.002)

            for n in range(4):
                await send(f"short{n}", [n])
            assert len(first.received) == len(second.received) == 2
            shared = list(range(64))
            for n in range(4):
                await send(f"shared{n}", [*shared, 100 + n])
            assert sorted((len(first.received), len(second.received))) == [2, 6]
            for n in range(4, 8):  # the known engine is busy by now: a prefix is not worth any wait
                await send(f"shared{n}", [*shared, 100 + n])
            assert abs(len(first.received) - len(second.received)) <= 5
            for stream in open_streams:
                stream.cancel()
            await handler.close()

    run(body())
