"""The HTTP protocol under the application: uvicorn's, with bounds on what precedes a body."""

from __future__ import annotations

from asyncio import AbstractEventLoop, BaseTransport, TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from reef.errors import InvalidRequest
from reef.service.request import BODY_ARRIVED
from reef.service.wire import openai

MAX_HEAD = 64 * 1024
"""Bytes of a request line and its headers."""
MAX_HEADERS = 256
HEAD_SECONDS = 30.0
"""How long a connection may take over a request's head, the first one's wait included."""
_CHUNK = 256 * 1024  # bytes that the event loop reads at once


class JoiningTransport:
    """The transport as uvicorn uses it; what is written in one turn of the loop leaves together.

    uvicorn writes an answer's head and its body one after the other: two system calls, and the client wakes up twice.
    """

    def __init__(self, transport: Any, loop: AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes] = []
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        data = b"".join(self._waiting)
        self._waiting.clear()
        if data and not self.is_closing():  # else the connection was lost in this very turn
            self._transport.write(data)


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a head that is too long (431) or too slow (408) and closes: it would grow in memory for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._read = 0  # bytes since the head began, and what came with them
        self._oversized = False
        self._slow: TimerHandle | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(JoiningTransport(transport, self.loop))  # type: ignore[arg-type]
        self._head_begins()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ends()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._read = (self._read if self._in_head else 0) + len(data)
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        if self._read > MAX_HEAD + _CHUNK:
            self._refuse(431, f"the request line and headers are over the limit of {MAX_HEAD} bytes")
        elif self._slow is None:
            self._head_begins()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_ends()
        if self._read > MAX_HEAD or len(self.headers) > MAX_HEADERS:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > MAX_HEAD or len(self.headers) > MAX_HEADERS:
                self._oversized = True
                raise ValueError("the head is too large")  # the parser stops, and send_400_response answers
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.scope[BODY_ARRIVED] = True  # type: ignore[literal-required]
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._oversized:
            self._refuse(431, f"a request may have {MAX_HEADERS} headers and {MAX_HEAD} bytes before its body")
        else:
            self._refuse(400, msg)

    def _head_begins(self) -> None:
        self._slow = self.loop.call_later(HEAD_SECONDS, self._refuse, 408, "the request's headers took too long")

    def _head_ends(self) -> None:
        self._in_head = False
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _refuse(self, status: int, message: str) -> None:
        self._head_ends()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else it would be read as part of that answer
            body = openai.error_body(InvalidRequest(message), status)
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()
