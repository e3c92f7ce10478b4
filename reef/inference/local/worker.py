"""The engine in its process: one thread steps it, one serves the data plane, the main thread takes control calls.

    control calls (main thread) ──┐
                                  ├──► mail ──► step loop: mail, step, mail, step ... ──► chunks ──┐
    Add, Abort (data plane) ──────┘             (sleeps when there is neither)                     │
    client ◄── one frame per step and connection ◄── data plane ◄─────────────────────────────────┘

The step loop alone touches the engine. A control call is mail too and runs between two steps, so a pause is a barrier:
when it returns, no step is in progress, and until resume a step only reports what ended (an abort, a dropped load).
Staging and scoring take longer than a step. They are chores: a slice or two of the oldest one run after each step, in a
tenth of the time that the step took, so that no client waits for a publication.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Condition, Thread
from typing import Any, TypeVar, cast

from reef.errors import EngineError, EngineUncertain, InvalidRequest, ReefError
from reef.inference.local.address import NODE, Address, node_address
from reef.inference.local.config import LocalConfig
from reef.inference.local.engine import LocalEngine
from reef.inference.local.protocol import (
    VERSION,
    Add,
    Chunks,
    FromEngine,
    Greet,
    Hello,
    Rejected,
    cut,
    encode,
    engine_reader,
)
from reef.inference.local.slices import Slices
from reef.inference.local.tensor_file import warm
from reef.points import Point, crossing
from reef.runtime.interfaces import (
    EngineReport,
    GenerateRequest,
    MemoryRegion,
    MemoryReport,
    PauseMode,
    TokenChunk,
    TransferSession,
    WeightLoad,
)

logger = logging.getLogger(__name__)

_MAX_GREETING_BYTES = 1024
_NOT_SHARED = "what the trainer writes in {} is not seen here ({}): both must share a file system"
_FAILURES_IN_A_ROW = 3
_STUCK_SECONDS = 300.0
_MAX_UNSENT_BYTES = 64 * 1024 * 1024
_CLOSE_SECONDS = 5.0
_CHORE_SHARE = 0.1  # of a step's time; times the chore's age in seconds, so that a large load is not forever on its way
T = TypeVar("T")


class _Chore:
    """A control call whose slices run between steps, and who waits for it."""

    def __init__(self, slices: Slices[object], future: Future[Any]) -> None:
        self._slices = slices
        self._future = future
        self._began = time.monotonic()

    def advance(self, step_seconds: float) -> bool:
        """Run at least one slice, more while there is time; True when the chore has ended."""
        now = time.monotonic()
        until = now + step_seconds * _CHORE_SHARE * max(1.0, now - self._began)
        try:
            next(self._slices)
            while time.monotonic() < until:
                next(self._slices)
        except StopIteration as end:
            self._future.set_result(end.value)
            return True
        except Exception as error:
            self.fail(error)
            return True
        return False

    def fail(self, error: Exception) -> None:
        self._slices.close()
        self._future.set_exception(error)


class _StepLoop:
    """Owns the engine on one thread. Everything else reaches it as mail."""

    def __init__(self, build: Callable[[Callable[[], None]], LocalEngine], plane: _DataPlane) -> None:
        """`build` gets what wakes the loop."""
        self._plane = plane
        self._wake = Condition()  # guards _mail and _open
        self._mail: deque[Callable[[], None]] = deque()
        self._open = True
        self._chores: deque[_Chore] = deque()  # the loop's own
        self._broken: str | None = None
        self._failures = 0
        self._step_began: float | None = None
        self._engine: LocalEngine
        ready: Future[None] = Future()
        self._thread = Thread(target=self._run, args=(build, ready), name="step-loop", daemon=True)
        self._thread.start()
        ready.result()

    def post(self, letter: Callable[[], None]) -> bool:
        """Run `letter`, which must not raise, between two steps; False after `close`."""
        with self._wake:
            if self._open:
                self._mail.append(letter)
                self._wake.notify()
            return self._open

    def call(self, work: Callable[[LocalEngine], T], *, even_if_broken: bool = False, all_or_broken: bool = False) -> T:
        """Run `work` between two steps and return what it returns. Raises EngineUncertain on a broken engine.

        With `all_or_broken` the engine is broken if the work fails.
        """
        future: Future[T] = Future()

        def letter() -> None:
            if self._broken is not None and not even_if_broken:
                future.set_exception(EngineUncertain(self._broken))
                return
            try:
                future.set_result(work(self._engine))
            except Exception as error:
                if all_or_broken:
                    self._broken = f"{type(error).__name__}: {error}"
                    error = EngineUncertain(self._broken)
                future.set_exception(error)

        if not self.post(letter):
            raise EngineError("the engine was closed")
        return future.result()

    def run_between_steps(self, start: Callable[[LocalEngine], Slices[T]]) -> T:
        """Run the slices of what `start` returns between the next steps, and return its result. Raises as `call`."""
        future: Future[T] = Future()
        self.call(lambda engine: self._chores.append(_Chore(start(engine), future)))
        return future.result()

    def add(self, request: GenerateRequest, reject: Callable[[Exception], None]) -> None:
        def letter() -> None:
            try:
                if self._broken is not None:
                    raise EngineUncertain(self._broken)
                self._engine.add(request)
            except Exception as error:
                reject(error)

        self.post(letter)

    def abort(self, request_id: str) -> None:
        def letter() -> None:
            try:
                self._engine.abort(request_id)
            except Exception as error:
                self._fail(error)

        self.post(letter)

    def wake(self) -> None:
        self.post(lambda: None)

    def health(self) -> str | None:
        began = self._step_began
        if self._broken is not None:
            return self._broken
        if not self._thread.is_alive():
            return "the step loop has ended"
        if began is not None and time.monotonic() - began > _STUCK_SECONDS:
            return f"a step has been running for {time.monotonic() - began:.0f} s"
        return None

    def close(self) -> None:
        """Run the mail that is there, then end; waits a bounded time for a step in progress."""
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self, build: Callable[[Callable[[], None]], LocalEngine], ready: Future[None]) -> None:
        try:
            self._engine = build(self.wake)
        except Exception as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        while self._read_mail():
            began = time.monotonic()
            if self._can_step():
                self._step()
            self._do_chores(time.monotonic() - began)
        self._fail_chores(EngineError("the engine was closed"))

    def _read_mail(self) -> bool:
        """Run the mail, after sleeping while there is nothing to do. False: closed."""
        with self._wake:
            while self._open and not self._mail and not self._chores and not self._can_step():
                self._wake.wait()
            mail, self._mail = self._mail, deque()
            still_open = self._open
        for letter in mail:
            letter()
        return still_open

    def _can_step(self) -> bool:
        return self._broken is None and self._engine.has_work()

    def _do_chores(self, step_seconds: float) -> None:
        if self._broken is not None:
            self._fail_chores(EngineUncertain(self._broken))
        elif self._chores and self._chores[0].advance(step_seconds):
            self._chores.popleft()

    def _fail_chores(self, error: Exception) -> None:
        while self._chores:
            self._chores.popleft().fail(error)

    def _step(self) -> None:
        self._step_began = time.monotonic()
        try:
            chunks = self._engine.step()
        except Exception as error:
            self._fail(error)
        else:
            self._failures = 0
            self._plane.deliver(chunks)
            for request_id, refusal in self._engine.take_refused():
                self._plane.reject_soon(request_id, refusal)
        self._step_began = None

    def _fail(self, error: Exception) -> None:
        """End everything in flight. An engine that fails again and again, or cannot even do this, is broken."""
        logger.error("the engine failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        self._failures += 1
        if isinstance(error, EngineUncertain) or self._failures >= _FAILURES_IN_A_ROW:
            self._broken = reason
        try:
            self._plane.deliver(self._engine.fail_all(reason))
        except Exception as second:
            logger.error("the engine cannot end its requests", exc_info=second)
            self._broken = f"{reason}; then {type(second).__name__}: {second}"
            self._plane.cut_all(reason)


class _Client(asyncio.Protocol):
    """One connection of the data plane."""

    def __init__(self, plane: _DataPlane) -> None:
        self._plane = plane
        self._reader = engine_reader()
        self._transport: asyncio.Transport
        self._welcome = False
        self.requests: set[str] = set()  # ids in flight

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's
        self._plane.clients.add(self)
        if not self._plane.listen.token:
            self._let_in()

    def data_received(self, data: bytes) -> None:
        if not self._welcome and len(data) > _MAX_GREETING_BYTES:
            self._transport.abort()
            return
        try:
            messages = self._reader.feed(data)
        except ReefError:
            logger.exception("closing a connection")
            self._transport.abort()
            return
        for message in messages:
            if isinstance(message, Greet):
                self._greet(message)
            elif not self._welcome:
                self._transport.abort()
                return
            elif isinstance(message, Add):
                self._plane.add(self, message.request)
            else:
                self._plane.abort(message.request_id)

    def connection_lost(self, error: Exception | None) -> None:
        self._plane.clients.discard(self)
        for request_id in list(self.requests):
            self._plane.abort(request_id)

    def _greet(self, message: Greet) -> None:
        if self._welcome:
            return
        if hmac.compare_digest(message.token.encode(), self._plane.listen.token.encode()):
            self._let_in()
        else:
            logger.error("closing a connection that does not know the token")
            self._transport.abort()

    def _let_in(self) -> None:
        self._welcome = True
        self.send(self._plane.hello)

    def send(self, message: FromEngine) -> None:
        self._transport.write(encode(message))
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            logger.error("closing a connection whose client does not read")
            self._transport.abort()

    def close(self) -> None:
        self._transport.close()


class _DataPlane:
    """The socket, on a thread with an event loop. Its state belongs to that thread."""

    def __init__(self, listen: str) -> None:
        self.listen = Address.parse(listen)
        self.clients: set[_Client] = set()
        self.hello: Hello
        self._owners: dict[str, _Client] = {}  # by request id
        self._steps: _StepLoop
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="data-plane", daemon=True)

    # From other threads

    def start(self, steps: _StepLoop, hello: Hello) -> None:
        """Listen. Replaces a socket that a dead engine left behind."""
        self._steps = steps
        self.hello = hello
        self._unlink()
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def deliver(self, chunks: list[TokenChunk]) -> None:
        if chunks:
            self._loop.call_soon_threadsafe(self._send, chunks)

    def cut_all(self, reason: str) -> None:
        """End what the engine did not end itself."""
        self._loop.call_soon_threadsafe(self._cut_all, reason)

    def reject_soon(self, engine_id: str, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._reject, engine_id, error)

    def drain(self) -> None:
        """Return when everything delivered so far was written to its socket's buffer."""
        written: Future[None] = Future()
        self._loop.call_soon_threadsafe(written.set_result, None)
        written.result()

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(_CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_SECONDS)

    # On the event loop

    def add(self, client: _Client, request: GenerateRequest) -> None:
        request_id = request.request_id
        if request_id in self._owners:
            client.send(Rejected(request_id, f"request {request_id!r} is in flight", True, "request_id"))
            return
        client.requests.add(request_id)
        self._owners[request_id] = client
        self._steps.add(request, partial(self.reject_soon, request_id))

    def abort(self, request_id: str) -> None:
        if request_id in self._owners:  # else it ended while the abort was on its way
            self._forget(request_id)
            self._steps.abort(request_id)

    def _send(self, chunks: list[TokenChunk]) -> None:
        frames: dict[_Client, list[TokenChunk]] = {}
        for chunk in chunks:
            client = self._owners.get(chunk.request_id)
            if client is None:
                continue  # aborted
            if chunk.ending is not None:
                self._forget(chunk.request_id)
            frames.setdefault(client, []).append(chunk)
        for client, its_chunks in frames.items():
            client.send(Chunks(its_chunks))

    def _reject(self, request_id: str, error: Exception) -> None:
        if request_id in self._owners:
            field = error.field if isinstance(error, InvalidRequest) else None
            rejected = Rejected(request_id, str(error), isinstance(error, InvalidRequest), field)
            self._forget(request_id).send(rejected)

    def _cut_all(self, reason: str) -> None:
        self._send([cut(request_id, reason) for request_id in self._owners])

    def _forget(self, request_id: str) -> _Client:
        client = self._owners.pop(request_id)
        client.requests.discard(request_id)
        return client

    async def _listen(self) -> None:
        where = self.listen
        if where.host == NODE:
            where = replace(where, host=node_address())
        if where.path:
            self._server = await self._loop.create_unix_server(lambda: _Client(self), where.path)
            return
        self._server = await self._loop.create_server(lambda: _Client(self), where.host, where.port)
        self.listen = replace(where, port=self._server.sockets[0].getsockname()[1])

    def _unlink(self) -> None:
        if self.listen.path:
            with suppress(FileNotFoundError):
                os.unlink(self.listen.path)

    async def _shut(self) -> None:
        self._server.close()
        for client in list(self.clients):
            client.close()
        self._unlink()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()


class EngineWorker:
    """One engine with its data plane, to be built by an executor. Control calls may come from any thread."""

    def __init__(
        self, *, config: LocalConfig, name: str, listen: str, base_content_id: str = "", paused: bool = False
    ) -> None:
        """`listen` is an `Address` as text; port 0 is any free one."""
        self._plane = _DataPlane(listen)
        self._pause_wait = 0.0  # seconds for which the newest pause waited for the step in progress
        self._steps = _StepLoop(lambda wake: LocalEngine(config, name, base_content_id, wake), self._plane)
        if paused:
            self._steps.call(lambda engine: engine.pause(PauseMode.RETRACT))
        max_context = self._steps.call(lambda engine: engine.max_context)
        self._plane.start(self._steps, Hello(VERSION, name, max_context))

    def endpoint(self) -> str:
        return str(self._plane.listen)

    def attach(self, session: TransferSession) -> None:
        """Raises EngineError unless the trainer's token is where the session says."""
        try:
            found = (Path(session.directory) / "token").read_text()
        except OSError as error:
            raise EngineError(_NOT_SHARED.format(session.directory, error.strerror)) from error
        if found != session.token:
            raise EngineError(_NOT_SHARED.format(session.directory, "another token is there"))

    def pause(self, mode: PauseMode) -> None:
        """Return when no token will be generated until `resume`, and earlier ones were handed to the socket."""
        with crossing(Point.ENGINE_PAUSE):
            self._steps.call(partial(self._pause, mode, time.monotonic()))
            self._plane.drain()

    def _pause(self, mode: PauseMode, asked: float, engine: LocalEngine) -> None:
        self._pause_wait = time.monotonic() - asked
        engine.pause(mode)

    def resume(self) -> None:
        with crossing(Point.ENGINE_RESUME):
            self._steps.call(lambda engine: engine.resume())

    def flush(self) -> None:
        self._steps.call(lambda engine: engine.flush())

    def stage(self, load: WeightLoad) -> None:
        with crossing(Point.ENGINE_LOAD):
            if load.path is not None:
                warm(Path(load.path))
            self._steps.run_between_steps(lambda engine: engine.stage_in_slices(load))

    def activate(self, lane: str, runtime_load_id: str) -> None:
        with crossing(Point.ENGINE_ACTIVATE):
            self._steps.call(lambda engine: engine.activate(lane, runtime_load_id))

    def drop(self, runtime_load_id: str) -> None:
        with crossing(Point.ENGINE_UNLOAD):
            self._steps.call(lambda engine: engine.drop(runtime_load_id))

    def evict(self, runtime_load_id: str) -> bool:
        with crossing(Point.ENGINE_UNLOAD):
            return self._steps.call(lambda engine: engine.evict(runtime_load_id))

    def score(self, runtime_load_id: str, token_ids: list[int]) -> list[float]:
        """Log-probabilities of token_ids[1:], [num_tokens - 1]."""
        with crossing(Point.ENGINE_SCORE):
            return self._steps.run_between_steps(lambda engine: engine.score_in_slices(runtime_load_id, token_ids))

    def report(self) -> EngineReport:
        report = self._steps.call(lambda engine: engine.report(), even_if_broken=True)
        report.stats["pause_wait_seconds"] = self._pause_wait
        return report

    def release_memory(self, regions: Collection[MemoryRegion]) -> MemoryReport:
        """An engine that fails this, or `restore_memory`, stays broken: nobody knows what it still holds."""
        with crossing(Point.ENGINE_RELEASE_MEMORY):
            return self._steps.call(lambda engine: engine.release_memory(regions), all_or_broken=True)

    def restore_memory(self) -> MemoryReport:
        with crossing(Point.ENGINE_RESTORE_MEMORY):
            return self._steps.call(lambda engine: engine.restore_memory(), all_or_broken=True)

    def dtype(self) -> str:
        """What the engine computes in: "float32", "bfloat16"."""
        return str(self._steps.call(lambda engine: engine.dtype)).removeprefix("torch.")

    def health(self) -> str | None:
        """None, or why the engine should be replaced. Never waits for a step."""
        return self._steps.health()

    def close(self) -> None:
        self._steps.close()
        self._plane.close()
