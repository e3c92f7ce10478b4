"""What is known of the request at hand, for whoever logs or counts; and the ASGI layer around the application.

The layer is outermost, so that it sees what every other one answers. It names each request (`x-request-id`: the
client's own, if it is one that may be logged), counts it, and writes the access log.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Histogram
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reef.metrics import REQUEST_SECONDS, REQUESTS
from reef.service.failures import CLIENT_CLOSED_REQUEST, on_unexpected
from reef.service.request import random_name
from reef.tracing import request_span

REQUEST_ID = b"x-request-id"

_ALLOWED = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")

access = logging.getLogger("reef.access")
log = logging.getLogger("reef.service")


@dataclass(slots=True)
class Observed:
    """One request, from its head until it is over."""

    request_id: str
    began: float = field(default_factory=time.perf_counter)
    receipt: str = ""
    scenario: str = ""
    over: bool = False  # a task that it left behind logs for itself


_CURRENT: ContextVar[Observed | None] = ContextVar("reef_request", default=None)


def working_for(scenario: str, receipt: str) -> Observed:
    """What the request of this task turned out to be about."""
    request = _CURRENT.get() or Observed("")
    request.scenario, request.receipt = scenario, receipt
    return request


def current() -> Observed | None:
    """The request that this task works for, unless it is over."""
    found = _CURRENT.get()
    return None if found is None or found.over else found


class Observer:
    """ASGI application around another one. `in_flight` counts requests that are not over."""

    def __init__(self, app: ASGIApp, paths: Collection[str], keeps: Callable[[str], bool]) -> None:
        """`paths` of our routes: nothing else that a client sends becomes a label. `keeps`: what redaction leaves."""
        self._app = app
        self._keeps = keeps
        self._paths = frozenset(paths)
        self._instruments: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._request_id(scope)
        seen = Observed(request_id.decode("ascii"))
        status = CLIENT_CLOSED_REQUEST

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message.get("headers", ())
                if not any(name == REQUEST_ID for name, _ in headers):  # an upstream's own is passed on
                    message["headers"] = [*headers, (REQUEST_ID, request_id)]
            await send(message)

        token = _CURRENT.set(seen)
        self.in_flight += 1
        try:
            with request_span(scope["method"], scope["headers"]) as span:
                try:
                    await self._app(scope, receive, send_named)
                finally:
                    if span is not None:
                        self._describe(span, scope, seen, status)
        except Exception as error:  # a bug; the client gets its 500, or an answer that the server breaks off
            log.exception("%s %s", scope["method"], _path(scope))
            if status == CLIENT_CLOSED_REQUEST:
                await (await on_unexpected(Request(scope), error))(scope, receive, send_named)
        finally:
            self.in_flight -= 1
            self._count(scope, status, time.perf_counter() - seen.began)
            seen.over = True
            _CURRENT.reset(token)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = self._route(scope)
        found = self._instruments.get((route, status))
        if found is None:
            found = REQUESTS.labels(route, status), REQUEST_SECONDS.labels(route)
            self._instruments[route, status] = found
        found[0].inc()
        found[1].observe(seconds)
        if access.isEnabledFor(logging.INFO):
            path = _path(scope)
            fields = {"method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 6)}
            access.info("%s %s %d %.1f ms", scope["method"], path, status, 1000 * seconds, extra={"fields": fields})

    def _describe(self, span: Any, scope: Scope, seen: Observed, status: int) -> None:
        route = self._route(scope)
        span.update_name(f"{scope['method']} {route}")
        found = {"request_id": seen.request_id, "scenario": seen.scenario, "receipt": seen.receipt}
        span.set_attributes({f"reef.{name}": value for name, value in found.items() if value})
        span.set_attributes({"http.route": route, "http.response.status_code": status})

    def _request_id(self, scope: Scope) -> bytes:
        for name, value in scope["headers"]:
            if name == REQUEST_ID:
                return value if _ALLOWED.fullmatch(value) and self._keeps(value.decode("ascii")) else _fresh_id()
        return _fresh_id()

    def _route(self, scope: Scope) -> str:
        if (matched := scope.get("route")) is not None:
            return str(matched.path)
        return scope["path"] if scope["path"] in self._paths else "other"


def _path(scope: Scope) -> str:
    """As it was sent, without its query."""
    sent: bytes = scope.get("raw_path") or scope["path"].encode()
    return sent.decode("ascii", "backslashreplace")[:300]


def _fresh_id() -> bytes:
    return b"req_" + random_name().encode()
