"""Routes of a deployment in front of an external provider: bytes go on as they came, both ways, and are recorded.

What the provider answers with an error status reaches the client and is not recorded. An answer that is cut short is
recorded as such, as far as a client saw it; it never trains.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reef.errors import ReefError, Unavailable, UpstreamError
from reef.inference.provider.client import returned_headers
from reef.inference.provider.connection import Connection
from reef.inference.provider.reply import Headers, Reply
from reef.inference.provider.stream import EventStream
from reef.metrics import answers, count_tokens, first_token
from reef.runtime.interfaces import Ending, Generation, OutgoingRequest
from reef.service.exchange import RecordedExchange
from reef.service.failures import CLIENT_CLOSED_REQUEST, stream_failure
from reef.service.gateway import Gateway
from reef.service.request import RECEIPT_HEADER, RequestHead, new_record_id
from reef.service.wire.base import check_lists

WATCH_AFTER = 0.25
"""Seconds before anybody looks whether the client is still there; most answers are back by then."""

_USAGE = re.compile(rb'_tokens"\s*:\s*(\d{1,12})\b', re.ASCII)  # in JSON text its quotes would be escaped
_COUNTED = {b"prompt": 0, b"input": 0, b"completion": 1, b"output": 1, b"cached": 2, b"cache_read_input": 2}
_USAGE_WITHIN = 4096  # bytes from either end of an answer

RECORDED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
RELAYED = {
    "/v1/messages/count_tokens": "POST",
    "/v1/models": "GET",
    "/v1/models/{model:path}": "GET",
    "/v1/responses/input_tokens": "POST",
    "/v1/responses/{response_id}": "GET DELETE",
    "/v1/responses/{response_id}/input_items": "GET",
}
"""Models, token counts, stored responses: methods by path.

Not a provider's stored completions: it would list those of every scenario to whoever asks.
"""


class Forwarding(RecordedExchange):
    """Forwards one request, records and sends the provider's answer."""

    def __init__(self, gateway: Gateway, head: RequestHead, request: Request, body: bytes) -> None:
        super().__init__(gateway, head, request.scope["path"], body)
        self._request = request

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._gateway.admit()
        if self._head.allowed.record and await self._gateway.existing(self._head.scenario) is None:
            self._gateway.check_room()
        reply = Reply()
        watching = _Watch(receive, reply)
        async with self._gateway.generating(reply):
            try:
                status, headers = await reply.begin(
                    _send(self._gateway, self._request, self._head, self._record_id, self._body)
                )
                if status == 200 and _is_stream(headers):
                    await self._send_events(reply, headers, send)
                else:
                    await self._send_whole(status, headers, await reply.whole(status, headers), send)
            except UpstreamError as error:
                if reply.ending is None:
                    raise
                if reply.ending is not Ending.CLIENT_LEFT:
                    raise Unavailable(str(error)) from error
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
            finally:
                watching.end()

    async def _record(self, response: bytes, status: int, generations: list[Generation]) -> None:
        """Return when the record is durable. Raises StorageError, Conflict."""
        await self._append(response, status, generations)
        for generation in generations:
            answers(generation.ending).inc()
        if not generations:
            answers("complete").inc()
        count_tokens(self._head.scenario, *usage(response))

    def _note_first(self) -> None:
        first_token(self._route).observe(time.perf_counter() - self._observed.began)

    async def _send_whole(self, status: int, headers: Headers, body: bytes, send: Send) -> None:
        if status < 400:
            self._note_first()
            await self._open_scenario()
            await self._record(body, status, [])
        await _send_response(status, self._headers(headers, receipt=status < 400), body, send)

    async def _send_events(self, reply: Reply, headers: Headers, send: Send) -> None:
        events = EventStream()
        failure: ReefError | None = None
        try:
            while not events.ended and (data := await reply.read()):
                if part := events.feed(data):
                    await self._send_part(headers, part, send)
        except UpstreamError as error:
            if not self._sent:  # nothing was sent: it can still be said by a status
                raise
            failure = error
        except asyncio.CancelledError:  # shutdown did not want to wait for a client that does not read
            await self._record(b"".join(self._sent), 200, [_cut(Ending.ENGINE_CUT)])
            return
        await self._end_events(events, reply.ending, failure, headers, send)

    async def _end_events(
        self, events: EventStream, ending: Ending | None, failure: ReefError | None, headers: Headers, send: Send
    ) -> None:
        rest = events.finish(self._record_id if self._head.allowed.record else None)
        if failure is None:
            rest += b"" if events.ended else events.partial
        elif ending is not Ending.CLIENT_LEFT:
            rest += stream_failure(failure, self._route)
        cut = [] if events.complete else [_cut(ending or Ending.ENGINE_CUT)]
        if not self._sent:
            await self._open_scenario()
        try:
            await self._record(b"".join([*self._sent, rest]), 200, cut)
        except ReefError as error:
            if not self._sent:
                raise
            rest = stream_failure(error, self._route)
        if not self._sent:
            await _send_response(200, self._headers(headers, receipt=True), rest, send)
            return
        with suppress(OSError):
            await send({"type": "http.response.body", "body": rest, "more_body": False})

    async def _send_part(self, headers: Headers, part: bytes, send: Send) -> None:
        try:
            if not self._sent:
                self._note_first()
                await self._open_scenario()
                await send(_start(200, self._headers(headers, receipt=True)))
            self._sent.append(part)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        except OSError:
            pass  # the client is gone; the watch sees it too

    async def _open_scenario(self) -> None:
        """Only now: a request that is refused creates nothing."""
        if not self._head.allowed.record:
            return
        scenario = await self._gateway.scenario(self._head.scenario)
        self._release_id = scenario.head.release_id

    def _headers(self, headers: Headers, *, receipt: bool) -> Headers:
        found = returned_headers(headers)
        if receipt and self._head.allowed.record:
            found.append((RECEIPT_HEADER.encode(), self._record_id.encode()))
        return found


class _Watch:
    """Aborts the reply when the client leaves. Costs next to nothing while answers are quick."""

    def __init__(self, receive: Receive, reply: Reply) -> None:
        self._receive = receive
        self._reply = reply
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER, self._begin)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._reply.abort(Ending.CLIENT_LEFT)

    def end(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


async def forward(request: Request) -> ASGIApp:
    """`POST`: forward the request, and record what passes."""
    gateway = Gateway.of(request)
    head = gateway.serving_head(request)
    return Forwarding(gateway, head, request, await gateway.body(request))


async def relay(request: Request) -> Response:
    """What is in RELAYED: forwarded, and not recorded."""
    if request.method == "HEAD":  # which Starlette lets in with GET; the answer has no body, whatever its length
        return Response(status_code=405, headers={"allow": "GET"})
    gateway = Gateway.of(request)
    head = gateway.serving_head(request)
    body = await gateway.body(request)
    gateway.admit()
    reply = Reply()
    async with gateway.generating(reply):
        status, headers = await reply.begin(_send(gateway, request, head, new_record_id(), body))
        content = await reply.whole(status, headers)
    response = Response(content, status)
    response.raw_headers = [*returned_headers(headers), (b"content-length", b"%d" % len(content))]
    return response


def _send(gateway: Gateway, request: Request, head: RequestHead, request_id: str, body: bytes) -> Awaitable[Connection]:
    provider = gateway.deployment.provider
    assert provider is not None  # else these are not the routes
    check_lists(body, gateway.config.max_messages)
    route = request.scope["raw_path"].decode("latin-1")
    return provider.send(
        request.method,
        route,
        request.scope["query_string"],
        request.scope["headers"],
        OutgoingRequest(request_id, head.scenario, route, body),
        credentials=not gateway.config.tokens,
    )


def _is_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in headers)


def _start(status: int, headers: Headers) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _send_response(status: int, headers: Headers, body: bytes, send: Send) -> None:
    await send(_start(status, [*headers, (b"content-length", b"%d" % len(body))]))
    await send({"type": "http.response.body", "body": body})


def usage(answer: bytes) -> tuple[int, int, int]:
    """Prompt, completion and cached tokens as the provider counts them, the last word on each; 0 where it says none."""
    found = [0, 0, 0]
    ends = answer if len(answer) <= 2 * _USAGE_WITHIN else answer[:_USAGE_WITHIN] + answer[-_USAGE_WITHIN:]
    for said in _USAGE.finditer(ends):
        kind = _COUNTED.get(ends[ends.rfind(b'"', 0, said.start()) + 1 : said.start()])
        if kind is not None:
            found[kind] = int(said[1])
    return found[0], found[1], found[2]


def _cut(ending: Ending) -> Generation:
    """What says of a record that its answer is not whole."""
    return Generation(prompt_ids=[], output_ids=[], logprobs=[], sampled_logprobs=[], spans=[], ending=ending)


def _route(path: str, endpoint: Callable[[Request], Awaitable[ASGIApp]], method: str) -> Route:
    return Route(path, endpoint, methods=[method])


ROUTES = [
    *(_route(path, forward, "POST") for path in RECORDED),
    *(_route(path, relay, method) for path, methods in RELAYED.items() for method in methods.split()),
]
