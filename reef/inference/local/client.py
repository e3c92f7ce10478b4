"""The service's side of the local engines: requests go to a socket, chunks come back as an async iterator."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

import msgspec

from reef.errors import ConfigError, InvalidRequest, ReefError, Unavailable, VerificationError
from reef.inference.local.address import Address
from reef.inference.local.protocol import (
    VERSION,
    Abort,
    Add,
    Chunks,
    Greet,
    Hello,
    Rejected,
    ToEngine,
    client_reader,
    cut,
    encode,
)
from reef.runtime.interfaces import GenerateRequest, InferenceHandler, TokenChunk

RETRY_AFTER = 5.0
"""Seconds; for a request that waited in vain."""

_RETRY_SECONDS = 0.1
_PREFIX_BLOCK = 32  # tokens; the grain at which prompts are recognised
_PREFIX_MEMORY = 65536  # blocks
_IMBALANCE = 4  # requests that a cached prefix is worth waiting behind


class HandlerOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """`inference.handler-config` of this handler."""

    max_in_flight: Annotated[int, msgspec.Meta(ge=1)] = 4096  # requests
    connect_timeout: Annotated[float, msgspec.Meta(gt=0)] = 30.0  # seconds
    queue_timeout: Annotated[float, msgspec.Meta(gt=0)] = 600.0  # seconds


class _Stream:
    """What arrived for one request and was not taken yet. One reader, on one event loop."""

    __slots__ = ("_items", "_waiter", "request_id", "runtime_load_id", "wire_id")

    def __init__(self, request_id: str, wire_id: str) -> None:
        self.request_id = request_id
        self.wire_id = wire_id
        self._items: deque[TokenChunk | ReefError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.runtime_load_id = ""

    def push(self, item: TokenChunk | ReefError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> TokenChunk | ReefError:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class _Connection(asyncio.Protocol):
    """One connection to one engine, with its open streams.

    On the wire every request has an id that is never used again, so that one sent again after an abort cannot receive
    what was still on its way for the first.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.address = Address.parse(endpoint)
        self.streams: dict[str, _Stream] = {}  # by wire id
        self.served = 0
        self._nonce = secrets.token_hex(4)
        self.hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None  # None: not connected
        self._reader = client_reader()
        self._retiring = False

    @property
    def connected(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def open(self, request: GenerateRequest) -> _Stream:
        self.served += 1
        wire_id = f"{request.request_id}#{self._nonce}.{self.served}"
        self._write(Add(replace(request, request_id=wire_id)))
        stream = self.streams[wire_id] = _Stream(request.request_id, wire_id)
        return stream

    def leave(self, stream: _Stream) -> None:
        """The reader is done: abort in the engine unless the stream has ended."""
        if self.streams.pop(stream.wire_id, None) is not None:
            self._write(Abort(stream.wire_id))
            self._close_if_idle()

    def retire(self) -> None:
        """Close once the last stream has ended."""
        self._retiring = True
        self._close_if_idle()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from asyncio's
        if self.address.token:
            self._write(Greet(self.address.token))

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except ReefError as error:
            self._lose(str(error))
            return
        for message in messages:
            if isinstance(message, Chunks):
                for chunk in message.chunks:
                    self._deliver(chunk)
            elif isinstance(message, Rejected):
                self._reject(message)
            elif not self.hello.done():
                self.hello.set_result(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(f"the connection to the engine at {self.address.shown} was lost" + (f": {error}" if error else ""))

    def _deliver(self, chunk: TokenChunk) -> None:
        if (stream := self.streams.get(chunk.request_id)) is None:
            return  # the reader has left
        if chunk.ending is not None:
            del self.streams[chunk.request_id]
            self._close_if_idle()
        stream.runtime_load_id = chunk.runtime_load_id
        chunk.request_id = stream.request_id
        stream.push(chunk)

    def _reject(self, message: Rejected) -> None:
        if (stream := self.streams.pop(message.request_id, None)) is not None:
            invalid = message.invalid
            stream.push(InvalidRequest(message.message, message.field) if invalid else Unavailable(message.message))
            self._close_if_idle()

    def _lose(self, reason: str) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        if not self.hello.done():
            self.hello.set_exception(Unavailable(reason))
            self.hello.exception()  # retrieved: nobody may be waiting
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.push(cut(stream.request_id, reason, stream.runtime_load_id))

    def _write(self, message: ToEngine) -> None:
        if self._transport is not None:
            self._transport.write(encode(message))

    def _close_if_idle(self) -> None:
        if self._retiring and not self.streams:
            self.close()


class LocalHandler(InferenceHandler):
    """Streams from the local engines whose addresses `endpoints` returns when asked.

    At most `max_in_flight` iterators are open at a time; each buffers at most what its `max_tokens` allows, so that a
    slow reader costs memory within a bound and never stalls the engine or other readers. What has to wait for its first
    chunk longer than `queue_timeout` seconds is aborted and raises Unavailable.
    """

    def __init__(self, endpoints: Callable[[], Sequence[str]], options: HandlerOptions | None = None) -> None:
        self._endpoints = endpoints
        self._options = options or HandlerOptions()
        self._connections: list[_Connection] = []
        self._in_flight = 0
        self._prefixes: OrderedDict[int, str] = OrderedDict()  # hash of a prompt's beginning -> endpoint
        self._max_context: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], endpoints: Callable[[], Sequence[str]]) -> LocalHandler:
        """The keys are those of HandlerOptions."""
        try:
            return cls(endpoints, msgspec.convert(dict(config), HandlerOptions))
        except msgspec.ValidationError as error:
            raise ConfigError(f"inference.handler-config: {error}") from error

    async def connect(self) -> None:
        """Connect to every engine anew; streams on older connections go on until they end.

        Raises Unavailable if an engine cannot be reached within the timeout; what was connected stays.
        """
        endpoints = self._endpoints()
        if not endpoints:
            raise Unavailable("no engine is started")
        results = await asyncio.gather(*(self._connect(endpoint) for endpoint in endpoints), return_exceptions=True)
        fresh = [result for result in results if isinstance(result, _Connection)]
        if failure := next((result for result in results if isinstance(result, BaseException)), None):
            for connection in fresh:
                connection.close()
            raise failure
        for connection in self._connections:
            connection.retire()
        self._connections = fresh
        self._max_context = min(connection.hello.result().max_context for connection in fresh)

    async def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []

    @property
    def max_context(self) -> int:
        if self._max_context is None:
            raise Unavailable("the engine was never connected")
        return self._max_context

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if self._in_flight >= self._options.max_in_flight:
            raise Unavailable(f"{self._in_flight} requests are in flight, the most that is allowed")
        connection = self._route(request)
        stream = connection.open(request)
        self._in_flight += 1
        try:
            item = await self._first(stream)
            while True:
                if isinstance(item, ReefError):
                    raise item
                yield item
                if item.ending is not None:
                    return
                item = await stream.next()
        finally:
            self._in_flight -= 1
            connection.leave(stream)

    async def _first(self, stream: _Stream) -> TokenChunk | ReefError:
        try:
            async with asyncio.timeout(self._options.queue_timeout):
                return await stream.next()
        except TimeoutError:
            seconds = self._options.queue_timeout
            raise Unavailable(f"no engine began to answer within {seconds:g} s", retry_after=RETRY_AFTER) from None

    async def _connect(self, endpoint: str) -> _Connection:
        """Connect to one engine, waiting for its socket to appear."""
        shown = Address.parse(endpoint).shown
        try:
            async with asyncio.timeout(self._options.connect_timeout):
                while True:
                    try:
                        connection = await _open(endpoint)
                        break
                    except OSError:
                        await asyncio.sleep(_RETRY_SECONDS)
                hello = await connection.hello
        except TimeoutError as error:
            raise Unavailable(f"no engine at {shown} within {self._options.connect_timeout:g} s") from error
        if hello.version != VERSION:
            connection.close()
            raise VerificationError(f"{hello.engine} speaks protocol {hello.version}, not {VERSION}")
        return connection

    def _route(self, request: GenerateRequest) -> _Connection:
        """Least in flight, unless the engine that knows the prompt's longest prefix is about as free."""
        live = [connection for connection in self._connections if connection.connected]
        if not live:
            raise Unavailable("no engine is connected")
        if len(live) == 1:
            return live[0]
        chosen = min(live, key=lambda c: (len(c.streams), c.served))
        keys = _prefix_keys(request)
        known = next((endpoint for key in reversed(keys) if (endpoint := self._prefixes.get(key))), None)
        for connection in live:
            if connection.endpoint == known and len(connection.streams) <= len(chosen.streams) + _IMBALANCE:
                chosen = connection
        for key in keys:
            self._prefixes[key] = chosen.endpoint
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > _PREFIX_MEMORY:
            self._prefixes.popitem(last=False)
        return chosen


async def _open(endpoint: str) -> _Connection:
    """Raises OSError."""
    loop, address = asyncio.get_running_loop(), Address.parse(endpoint)
    if address.path:
        _, connection = await loop.create_unix_connection(lambda: _Connection(endpoint), address.path)
    else:
        _, connection = await loop.create_connection(lambda: _Connection(endpoint), address.host, address.port)
    return connection


def _prefix_keys(request: GenerateRequest) -> list[int]:
    """One hash per beginning of the prompt, in blocks; shorter first."""
    keys: list[int] = []
    key = hash((request.lane, request.runtime_load_id))
    ids = request.prompt_ids
    for end in range(_PREFIX_BLOCK, len(ids) + 1, _PREFIX_BLOCK):
        key = hash((key, *ids[end - _PREFIX_BLOCK : end]))
        keys.append(key)
    return keys
