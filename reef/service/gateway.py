"""What all handlers share, and the door that closes at shutdown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from starlette.requests import Request

from reef.errors import Forbidden, NotFound, RequestTooLarge, TooManyRequests, Unavailable
from reef.inference.chat.messages import Conversation
from reef.inference.chat.service import ChatStream
from reef.inference.provider.reply import Reply
from reef.runtime.interfaces import Ending
from reef.scenario.scenario import Scenario
from reef.service.auth import Caller
from reef.service.config import ServiceConfig
from reef.service.deployment import Deployment
from reef.service.recall import Recall
from reef.service.redaction import Redaction
from reef.service.request import EVERYTHING, RECORD_HEADER, SCENARIO_HEADER, RequestHead, read_body, read_head
from reef.service.stored import StoredAnswers
from reef.service.wire.base import check_nesting

CUT_SECONDS = 2.0
"""How long a cut exchange may take to be recorded; one that waits for a client that does not read is cancelled then."""

RETRY_SECONDS = 60.0
"""When to ask again for a scenario over the limit: nothing makes room but an operator."""
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
        self.redaction = Redaction.load(config.redact)
        self._opening: set[str] = set()  # scenarios that are being made
        self._receipts: dict[tuple[str, str], None] = {}  # the newest, the oldest of these first
        self._closing = False

    @staticmethod
    def of(request: Request) -> Gateway:
        gateway: Gateway = request.app.state.gateway
        return gateway

    @cached_property
    def recall(self) -> Recall:
        """What the store knows of earlier answers."""
        return Recall(self.stored, self.deployment.storage, self.deployment.chat, self.started_at)

    @cached_property
    def stored(self) -> StoredAnswers:
        """The answers that clients may have again."""
        return StoredAnswers(self.deployment.storage)

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

    def head(self, request: Request) -> RequestHead:
        """What the request's headers say, and what it is allowed. Raises InvalidRequest, Forbidden."""
        head = read_head(request, self.config.default_scenario)
        self.redaction.check_name(head.scenario, SCENARIO_HEADER)
        self.redaction.check_name(head.record_id, RECORD_HEADER)
        caller = Caller.of(request)
        caller.check_scenario(head.scenario)
        allowed = self.config.permissions_of(head.scenario) & caller.permissions
        return head if allowed == EVERYTHING else replace(head, allowed=head.allowed & allowed)

    def serving_head(self, request: Request) -> RequestHead:
        """`head` of a request for an answer. Raises Forbidden where serving is off."""
        head = self.head(request)
        if not head.allowed.serve:
            raise Forbidden(f"serving is off for scenario {head.scenario!r}")
        return head

    async def body(self, request: Request) -> bytes:
        """The request's body, within the configured limits. Raises RequestTooLarge, TooSlow, ClientDisconnect."""
        content = await read_body(request, self.config.max_body_bytes, self.config.body_timeout)
        check_nesting(content, self.config.max_json_depth)
        return content

    def check_messages(self, conversation: Conversation, field: str) -> None:
        """Raises RequestTooLarge naming `field`."""
        if (number := len(conversation.messages)) > (limit := self.config.max_messages):
            raise RequestTooLarge(f"at most {limit} messages, got {number}", field)

    async def existing(self, scenario: str) -> Scenario | None:
        """The scenario, or None; never creates it."""
        try:
            return await self.deployment.scenario(scenario, create=False)
        except NotFound:
            return None

    def check_room(self) -> None:
        """Raises TooManyRequests if no other scenario may be made."""
        if len(self.deployment.scenarios()) + len(self._opening) >= self.config.max_scenarios:
            raise TooManyRequests(f"no more than {self.config.max_scenarios} scenarios may be made", RETRY_SECONDS)

    async def scenario(self, name: str) -> Scenario:
        """The scenario, made on first use. Raises TooManyRequests."""
        if (found := await self.existing(name)) is not None:
            return found
        if name not in self._opening:
            self.check_room()
        self._opening.add(name)
        try:
            return await self.deployment.scenario(name, create=True)
        finally:
            self._opening.discard(name)

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
