"""One recorded exchange: a call in, an answer out, and its record durable before its receipt is sent.

::

    claim the id ─► stored already? ─yes─► send the stored bytes
                          │no
                          ▼
    start ─► first delta ─► open the scenario ─► send deltas ... ─► append the record ─► send the rest, with receipt
                 │                                  │ client leaves / engine fails / shutdown
                 ▼ error                            ▼
              4xx, 503, nothing stored        append the record with that ending: it never trains

A client sees a prefix of what is recorded, and all of it unless it left.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from reef.errors import Conflict, EngineError, InvalidRequest, ReefError, Unavailable
from reef.inference.chat.choice import Delta
from reef.inference.chat.service import ChatStream
from reef.metrics import answers, count_tokens, first_token
from reef.runtime.interfaces import Ending, Generation, InferenceRecord
from reef.service.failures import CLIENT_CLOSED_REQUEST, failure_response
from reef.service.gateway import Gateway
from reef.service.observe import working_for
from reef.service.request import RECEIPT_HEADER, RequestHead, new_record_id
from reef.service.wire.base import Api, ChatCall

Result = TypeVar("Result")

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"


class RecordedExchange(ABC):
    """An ASGI response that is recorded. A request that is repeated with its id gets the stored bytes."""

    def __init__(self, gateway: Gateway, head: RequestHead, route: str, body: bytes) -> None:
        self._gateway = gateway
        self._head = head
        self._route = route
        self._body = body
        self._record_id = head.record_id or new_record_id()
        self._created_at = time.time()
        self._release_id: str | None = None
        self._sent: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._observed = working_for(self._head.scenario, self._record_id if self._head.allowed.record else "")
        if self._head.record_id is None:
            await self._generate(scope, receive, send)
            return
        async with self._gateway.claim(self._head.scenario, self._record_id):
            stored = await self._stored()
            if stored is not None:
                await stored(scope, receive, send)
            else:
                await self._generate(scope, receive, send)

    async def _stored(self) -> Response | None:
        """The answer to the same request with the same id, if there is one. Raises Conflict for another request."""
        found = await self._gateway.deployment.storage.get(self._head.scenario, [self._record_id])
        record = found.get(self._record_id)
        if record is None:
            return None
        if isinstance(record, InferenceRecord) and record.purged:
            raise Conflict(f"the answer with record id {self._record_id!r} was emptied by retention; ask with a new id")
        if isinstance(record, InferenceRecord) and record.redacted:
            raise Conflict(f"the answer with record id {self._record_id!r} was redacted; ask with a new id")
        if not isinstance(record, InferenceRecord) or (record.route, record.request) != (self._route, self._body):
            raise Conflict(f"record id {self._record_id!r} is taken by another request")
        if not all(generation.ending.complete for generation in record.generations):
            raise Conflict(f"the answer with record id {self._record_id!r} was cut short; ask again with a new id")
        media_type = JSON if record.response.lstrip()[:1] in (b"{", b"[") else EVENT_STREAM
        return Response(record.response, record.status, {RECEIPT_HEADER: self._record_id}, media_type)

    @abstractmethod
    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer anew."""

    async def _append(
        self,
        response: bytes,
        status: int,
        generations: list[Generation],
        parent_id: str | None = None,
        fork_of: str | None = None,
    ) -> None:
        """Return when the record is durable, or at once where recording is off. Raises StorageError, Conflict."""
        if not self._head.allowed.record:
            return
        await self._gateway.deployment.storage.append(
            InferenceRecord(
                record_id=self._record_id,
                scenario=self._head.scenario,
                created_at=self._created_at,
                route=self._route,
                request=self._body,
                response=response,
                status=status,
                release_id=self._release_id,
                generations=generations,
                tags=self._head.tags,
                parent_id=parent_id,
                fork_of=fork_of,
                train=self._head.allowed.train,
            )
        )
        self._gateway.remember(self._head.scenario, self._record_id)


class Exchange(RecordedExchange):
    """Generates, records and sends the answer to one call."""

    def __init__(self, gateway: Gateway, head: RequestHead, call: ChatCall, api: Api, body: bytes) -> None:
        super().__init__(gateway, head, api.route, body)
        self._call = call = call if head.allowed.record else replace(call, recorded=False)
        model = gateway.deployment.models()[0]
        self._writer = api.writer(call, self._record_id, int(self._created_at), model)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._gateway.admit()
        scenario = await self._gateway.existing(self._head.scenario)
        head = scenario.head if scenario is not None else None
        recorded = self._head.allowed.record
        if head is None and recorded:
            self._gateway.check_room()
        stream = await self._in_terms_of_this_api(self._start())
        async with self._gateway.generating(stream):
            watcher = asyncio.create_task(_abort_when_client_leaves(receive, stream))
            try:
                first = await self._in_terms_of_this_api(anext(stream, None))
                first_token(self._route).observe(time.perf_counter() - self._observed.began)
                if first is not None and first.ending is Ending.ENGINE_CUT and not stream.began:
                    raise Unavailable(first.error or "the engine failed")
                if head is None and recorded:  # created only now: a request that is refused creates nothing
                    head = (await self._gateway.scenario(self._head.scenario)).head
                self._release_id = head.release_id if head is not None else None
                if self._call.stream and first is not None:
                    await self._send_stream(stream, first, send)
                else:
                    response = await self._whole(stream, first)
                    await response(scope, receive, send)
            finally:
                watcher.cancel()

    async def _in_terms_of_this_api(self, asking: Awaitable[Result]) -> Result:
        """What is refused names the field as this API calls it."""
        try:
            return await asking
        except InvalidRequest as error:
            error.field = self._call.field_of(error)
            raise

    async def _start(self) -> ChatStream:
        request = self._call.request(new_record_id(), self._record_id, self._head.scenario)
        return await self._gateway.deployment.chat.start(request)

    async def _whole(self, stream: ChatStream, first: Delta | None) -> Response:
        deltas: list[list[Delta]] = [[] for _ in stream.choices]
        delta, error = first, "the server is shutting down"
        while delta is not None and delta.ending is not Ending.ENGINE_CUT:
            deltas[delta.index].append(delta)
            delta = await anext(stream, None)
        if delta is not None:
            error = delta.error or "the engine failed"
        if stream.ending.complete:
            response = Response(self._writer.whole(stream.choices, deltas), 200, media_type=JSON)
        else:
            # The client saw nothing of this answer, so its own id stays free for another try.
            self._record_id = self._observed.receipt = new_record_id()
            response = _cut_response(stream.ending, error, self._route)
        stream.abort(Ending.ENGINE_CUT)
        if self._head.allowed.record:
            response.headers[RECEIPT_HEADER] = self._record_id
        await self._record(stream, bytes(response.body), response.status_code)
        return response

    async def _send_stream(self, stream: ChatStream, first: Delta, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers()})
        try:
            await self._send_deltas(stream, first, send)
        except asyncio.CancelledError:  # shutdown did not want to wait for a client that does not read
            stream.abort(Ending.ENGINE_CUT)
            await self._record(stream, b"".join(self._sent), 200)

    async def _send_deltas(self, stream: ChatStream, first: Delta, send: Send) -> None:
        await self._send_part(self._writer.opening(stream.choices), send)
        unfinished = len(stream.choices)
        delta: Delta | None = first
        failure = "the server is shutting down"
        while delta is not None and delta.ending is not Ending.ENGINE_CUT:
            await self._send_part(self._writer.delta(delta), send)
            if delta.ending is not None:
                unfinished -= 1
                if unfinished == 0:
                    break
                await self._send_part(self._writer.ended(delta, stream.choices[delta.index]), send)
            delta = await anext(stream, None)
        if delta is not None and unfinished:
            failure = delta.error or "the engine failed"
            stream.abort(Ending.ENGINE_CUT)
        await self._end_stream(stream, delta, failure, send)

    async def _end_stream(self, stream: ChatStream, last: Delta | None, failure: str, send: Send) -> None:
        if stream.ending is Ending.CLIENT_LEFT:
            rest = b""
        elif last is not None and stream.ending.complete:
            rest = self._writer.closing(last, stream.choices)
        else:
            rest = self._writer.failure(EngineError(failure))
        try:
            await self._record(stream, b"".join([*self._sent, rest]), 200)
        except ReefError as error:
            rest = self._writer.failure(error)
        with suppress(OSError):
            await send({"type": "http.response.body", "body": rest, "more_body": False})

    async def _send_part(self, part: bytes, send: Send) -> None:
        if part:
            self._sent.append(part)
            with suppress(OSError):  # the client is gone; the watcher sees it too
                await send({"type": "http.response.body", "body": part, "more_body": True})

    async def _record(self, stream: ChatStream, response: bytes, status: int) -> None:
        """Return when the record is durable. Raises StorageError, Conflict."""
        prompt = stream.prompt
        await self._append(response, status, stream.generations, prompt.parent_id, prompt.fork_of)
        _count(self._head.scenario, stream)
        if self._head.allowed.record:
            self._gateway.deployment.chat.remember(stream, self._record_id)

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", EVENT_STREAM.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *([(RECEIPT_HEADER.encode(), self._record_id.encode())] if self._head.allowed.record else []),
        ]


def _count(scenario: str, stream: ChatStream) -> None:
    prompt = completion = cached = 0
    for generation in stream.generations:
        answers(generation.ending).inc()
        prompt += len(generation.prompt_ids)
        completion += len(generation.output_ids)
        cached += generation.cached_tokens
    count_tokens(scenario, prompt, completion, cached)


async def _abort_when_client_leaves(receive: Receive, stream: ChatStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.abort(Ending.CLIENT_LEFT)


def _cut_response(ending: Ending, reason: str, path: str) -> Response:
    if ending is Ending.CLIENT_LEFT:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return failure_response(Unavailable(reason), path)
