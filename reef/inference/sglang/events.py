"""A POST whose answer is read as it comes: server-sent events over HTTP/1.1, on one asyncio connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from urllib.parse import urlsplit

import httptools

from reef.errors import InvalidRequest, ReefError, Unavailable

_READ_BYTES = 65536


def refused(status: int, message: str) -> ReefError:
    """A status that is not 200, as an error: the caller's fault, or the engine's for now."""
    if 400 <= status < 500 and "reef: the load" not in message:  # weights that are not there now are nobody's fault
        return InvalidRequest(message)
    return Unavailable(message)


class _Answer:
    """Callbacks of the parser."""

    def __init__(self) -> None:
        self.body: deque[bytes] = deque()
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.complete = True


async def stream_events(
    url: str, path: str, body: bytes, connect_timeout: float, headers: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    """Yield the data of each event. Leaving the iterator closes the connection, which aborts the request.

    Raises Unavailable when nobody listens, what the server refused, ConnectionError when the answer breaks off.
    """
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(connect_timeout):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"the engine at {url} is not reachable: {error}") from error
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        async for line in _lines(reader):
            if line.startswith(b"data: "):
                yield line[6:]
    finally:
        writer.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    pending, broken = b"", None
    while not answer.complete:
        if broken is not None:  # only now: what came before it counts
            raise ConnectionError(f"the answer is not HTTP: {broken}")
        if not (data := await reader.read(_READ_BYTES)):
            raise ConnectionError("the answer broke off")
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            broken = error
        pending += b"".join(answer.body)
        answer.body.clear()
        if (status := parser.get_status_code()) == 200:
            *lines, pending = pending.split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
        elif answer.complete:
            raise refused(status, pending.decode(errors="replace")[:500])
