"""A provider whose answers are scripted byte by byte, on a thread of its own, and a Reef in front of it."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from reef.config import resolve
from reef.service.app import build
from tests.service.conftest import Running, running

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class FakeProvider:
    """Answers every request with `answer`: bytes, or a coroutine function that writes what it likes."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.answer: bytes | Script = reply({})
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context))
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def headers(self, index: int = -1) -> dict[str, str]:
        lines = self.heads[index].split("\r\n")[1:]
        return dict(line.split(": ", 1) for line in lines if line)

    def close(self) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    def _run(self, awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result(60)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = next((line[16:] for line in head.split("\r\n") if line.startswith("content-length: ")), "0")
                self.bodies.append(await reader.readexactly(int(length)))
                self.heads.append(head)
                if callable(self.answer):
                    await self.answer(reader, writer)
                else:
                    writer.write(self.answer)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def reply(content: Any, status: int = 200, **headers: str) -> bytes:
    """A whole answer. Bytes are sent as they are."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    named = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    head = "".join(f"{name}: {text}\r\n" for name, text in {**named, "content-length": str(len(body))}.items())
    return f"HTTP/1.1 {status} Said\r\n{head}\r\n".encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(content: Any, name: str = "") -> bytes:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (f"event: {name}\n" if name else "").encode() + b"data: " + data + b"\n\n"


def piece(text: str | None = None, finish: str | None = None, index: int = 0) -> bytes:
    """A chunk of a chat completion."""
    delta = {} if text is None else {"content": text}
    return event({"id": "c", "choices": [{"index": index, "delta": delta, "finish_reason": finish}]})


USAGE = event({"id": "c", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}})
DONE = event(b"[DONE]")


async def hang(reader, writer):
    await asyncio.sleep(600)


async def hang_up(reader, writer):
    writer.close()


@contextmanager
def in_front(
    url: str, data: Path, tokens: list[str] | None = None, settings: dict[str, Any] | None = None, **flags: str
) -> Iterator[Running]:
    given = {"inference.upstream-url": url, "reef.data-dir": str(data)}
    given |= {f"inference.{name.replace('_', '-')}": text for name, text in flags.items()}
    with running(build(resolve(environ={}, flags=given).config), tokens=tokens or [], **settings or {}) as found:
        yield found


def ask(
    reef: Running, route: str = "/v1/chat/completions", content: bytes = b'{"model":"m"}', **headers: str
) -> httpx.Response:
    named = {"x-reef-scenario": "s", **{name.replace("_", "-"): text for name, text in headers.items()}}
    return reef.http.post(route, content=content, headers=named)


def message(response: httpx.Response) -> str:
    return response.json()["error"]["message"]
