"""What all handlers share, and the door that closes at shutdown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

from starlette.requests import Request

from reef.errors import NotFound, Unavailable
from reef.inference.chat.service import ChatStream
from reef.inference.provider.reply import Reply
from reef.runtime.interfaces import Ending
from reef.scenario.scenario import Scenario
from reef.service.config import ServiceConfig
from reef.service.deployment import Deployment
from reef.service.recall import Recall

CUT_SECONDS = 2.0
"""How long a cut exchange may take to be recorded; one that waits for a client that does not read is cancelled then."""

RECENT_RECEIPTS = 16_384
"""Answers that are known to be stored without asking the store, some 4 MB of them."""


class Gateway:
    """The deployment as its HTTP side sees it, and the exchanges in flight."""

    def __init__(self, deployment: Deployment, config: ServiceConfig) -> None:
        self.deployment = deployment
        self.config = config
        self.started_at = time.time()
        self._streams: dict[ChatStream | Reply, asyncio.Task[Any]] = {}
        self._claims: dict[tuple[str, str], asyncio.Event] = {}
        self._receipts: dict[tuple[str, str], None] = {}  # the newest, the oldest of these first
        self._closing = False

    @staticmethod
    def of(request: Request) -> Gateway:
        gateway: Gateway = request.app.state.gateway
        return gateway

    @cached_property
    def recall(self) -> Recall:
        """What the store knows of earlier answers."""
        return Recall(self.deployment.storage, self.deployment.chat, self.started_at)

    def remember(self, scenario: str, receipt: str) -> None:
        """An answer was stored: a report on it soon need not look for it."""
        if len(self._receipts) >= RECENT_RECEIPTS:
            del self._receipts[next(iter(self._receipts))]
        self._receipts[scenario, receipt] = None

    def remembers(self, scenario: str, receipt: str) -> bool:
        return (scenario, receipt) in self._receipts

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    async def existing(self, scenario: str) -> Scenario | None:
        """The scenario, or None; never creates it."""
        try:
            return await self.deployment.scenario(scenario, create=False)
        except NotFound:
            return None

    async def health(self) -> list[str]:
        """Why it cannot serve or store; empty when it can."""
        return (["shutting down"] if self._closing else []) + await self.deployment.health()

    def admit(self) -> None:
        """Raises Unavailable once shutdown has begun, and while the engines cannot serve."""
        if self._closing:
            raise Unavailable("shutting down", retry_after=5.0)
        self.deployment.admit()

    @asynccontextmanager
    async def claim(self, scenario: str, record_id: str) -> AsyncIterator[None]:
        """Hold an id that a client chose, so that the same request sent twice at once is answered once."""
        key = (scenario, record_id)
        while (held := self._claims.get(key)) is not None:
            await held.wait()
        done = self._claims[key] = asyncio.Event()
        try:
            yield
        finally:
            del self._claims[key]
            done.set()

    def generating(self, stream: ChatStream | Reply) -> _Generating:
        """Register a stream, so that shutdown can cut it; always closes it."""
        return _Generating(self._streams, stream)

    async def drain(self, grace: float) -> None:
        """Close the door, give what runs `grace` seconds to finish, then cut it; return when it is recorded as cut."""
        self._closing = True
        await self._idle(grace)
        for stream in list(self._streams):
            stream.abort(Ending.ENGINE_CUT)
        await self._idle(CUT_SECONDS)
        for task in list(self._streams.values()):
            task.cancel()
        await self._idle(CUT_SECONDS)

    async def _idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


class _Generating:
    """What `generating` gives. A context manager made of a generator costs several times as much."""

    def __init__(self, streams: dict[ChatStream | Reply, asyncio.Task[Any]], stream: ChatStream | Reply) -> None:
        self._streams = streams
        self._stream = stream

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._streams[self._stream] = task

    async def __aexit__(self, *error: object) -> None:
        del self._streams[self._stream]
        await self._stream.close()
