"""Keep-alive HTTP/1.1 connections to one server: a bounded pool of them, and one exchange at a time on each.

Nothing that was sent is sent again. Only making a connection is tried again, since nothing has been sent by then.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from reef.errors import Unavailable, UpstreamError, UpstreamTimeout

HIGH_WATER = 1 << 20  # bytes of an answer that may wait for their reader
IDLE_SECONDS = 60.0
RETRY_SECONDS = 0.05  # before the first retry; twice as long before each further one


class Connection(asyncio.Protocol):
    """One exchange at a time: `send`, `head`, then `read` until it is empty."""

    def __init__(self, released: Callable[[Connection], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._released = released
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.touched = self._loop.time()  # when it last heard from the server, or was given a request
        self.busy = False
        self._open = False
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._waiting_bytes = 0
        self._framed = False  # the end of the body shows in the bytes, not in the end of the connection
        self._keep = False
        self._headers_complete = False
        self.complete = False
        self._error: Exception | None = None

    # ------------------------------------------------------------------ the exchange

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self.busy = True
        self.touched = self._loop.time()
        self._transport.write(request)

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Status and headers, names in lower case. Raises UpstreamError, UpstreamTimeout."""
        while not self._headers_complete:
            await self._wait()
        return self._parser.get_status_code(), self._headers

    async def read(self) -> bytes:
        """What has come of the body; empty at its end. Raises UpstreamError, UpstreamTimeout."""
        while not self._body:
            if self.complete:
                return b""
            await self._wait()
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        if self._waiting_bytes > HIGH_WATER and self._transport is not None:
            self._transport.resume_reading()
        self._waiting_bytes = 0
        return data

    async def read_all(self) -> bytes:
        while not self.complete:
            await self._wait()
            if self._waiting_bytes > HIGH_WATER and self._transport is not None:
                self._transport.resume_reading()
        return b"".join(self._body)

    def release(self) -> None:
        """The exchange is over: keep the connection if its answer was read to the end, else close it."""
        if self.busy:
            self.busy = False
            self._released(self)

    @property
    def reusable(self) -> bool:
        return self._open and self.complete and self._framed and self._keep

    def renew(self) -> None:
        """Be ready for the next exchange."""
        self._begin()
        self.touched = self._loop.time()

    def fail(self, error: Exception) -> None:
        """Close; whoever waits, or will, gets `error`."""
        self._error = self._error or error
        self.close()
        self._wake()

    def close(self) -> None:
        self._open = False
        if self._transport is not None:
            self._transport.abort()

    @property
    def alive(self) -> bool:
        return self._open

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ------------------------------------------------------------------ asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._open = cast(asyncio.Transport, transport), True  # uvloop's is no instance of it

    def data_received(self, data: bytes) -> None:
        self.touched = self._loop.time()
        if not self.busy or self.complete:  # nobody asked for this
            self.fail(UpstreamError("the provider sent more than an answer"))
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(UpstreamError(f"the provider's answer is not HTTP: {error}"))
            return
        if self._waiting_bytes > HIGH_WATER and self._transport is not None:
            self._transport.pause_reading()
        if self._headers_complete:
            self._wake()

    def eof_received(self) -> None:
        if self._headers_complete and not self._framed:
            self.complete = True

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        if not self.complete:
            self._error = self._error or UpstreamError(
                f"the provider closed the connection{f': {error}' if error else ''}"
            )
        self._wake()
        if not self.busy:
            self._released(self)

    # ------------------------------------------------------------------ the parser calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked")):
            self._framed = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._headers_complete = status >= 200
        self._framed = self._framed or status in (204, 304)
        self._keep = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        self._waiting_bytes += len(data)

    def on_message_complete(self) -> None:
        if self._headers_complete:
            self.complete = True
        else:  # an interim answer, such as 103; the real one follows
            self._headers = []
            self._framed = False


class Pool:
    """At most `connections` to one server. Open and close it on one event loop."""

    def __init__(
        self, url: str, *, connections: int, connect_timeout: float, connect_retries: int, timeout: float
    ) -> None:
        parts = urlsplit(url)
        self._host, self._tls = str(parts.hostname), parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._connect_timeout = connect_timeout
        self._connect_retries = connect_retries
        self._timeout = timeout
        self._idle: list[Connection] = []  # the newest last
        self._busy: set[Connection] = set()
        self._slots = asyncio.Semaphore(connections)
        self._context = ssl.create_default_context() if self._tls else None
        self._sweeper: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep(), name="upstream timeouts")

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in [*self._busy, *self._idle]:
            connection.fail(UpstreamError("Reef is shutting down"))
        self._idle.clear()

    async def send(self, request: bytes) -> Connection:
        """Send it once, on a connection that the caller releases.

        Raises UpstreamError, UpstreamTimeout and Unavailable, and has sent nothing then.
        """
        await (self._wait_for_slot() if self._slots.locked() else self._slots.acquire())
        try:
            connection = self._take_idle() or await self._connect()
        except BaseException:
            self._slots.release()
            raise
        self._busy.add(connection)
        connection.send(request)
        return connection

    async def _wait_for_slot(self) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout):
                await self._slots.acquire()
        except TimeoutError:
            raise Unavailable("every connection to the provider is in use") from None

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                connection.renew()
                return connection
        return None

    def _release(self, connection: Connection) -> None:
        if connection in self._busy:
            self._busy.discard(connection)
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            self._slots.release()
        elif connection in self._idle and not connection.alive:
            self._idle.remove(connection)

    async def _connect(self) -> Connection:
        loop, wait, attempts = asyncio.get_running_loop(), RETRY_SECONDS, 0
        try:
            async with asyncio.timeout(self._connect_timeout):
                while True:
                    try:
                        return (
                            await loop.create_connection(
                                lambda: Connection(self._release), self._host, self._port, ssl=self._context
                            )
                        )[1]
                    except OSError as error:
                        attempts += 1
                        if attempts > self._connect_retries:
                            raise UpstreamError(f"cannot connect to the provider: {_reason(error)}") from error
                    await asyncio.sleep(wait)
                    wait *= 2
        except TimeoutError as error:
            raise UpstreamTimeout(f"no connection to the provider within {self._connect_timeout:g} s") from error

    async def _sweep(self) -> None:
        """Timeouts cost a request nothing: they are looked for now and then."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self._timeout / 4))
            now = loop.time()
            for connection in [found for found in self._busy if now - found.touched > self._timeout]:
                connection.fail(UpstreamTimeout(f"the provider sent nothing for {self._timeout:g} s"))
            for connection in [found for found in self._idle if now - found.touched > IDLE_SECONDS]:
                connection.close()


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
