"""Errors as HTTP responses, in the shape of the API that was called: Anthropic's under /v1/messages, else OpenAI's."""

from __future__ import annotations

import logging
import math

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from reef.errors import (
    NotFound,
    ReefError,
    RequestTooLarge,
    TooManyRequests,
    TooSlow,
    Unauthorized,
    Unavailable,
    http_status,
)
from reef.metrics import ERRORS
from reef.service.wire import messages, openai

log = logging.getLogger("reef.service")

CLIENT_CLOSED_REQUEST = 499
"""The client left before it was answered; nobody reads this status, but it is counted."""


def failure_response(
    error: ReefError, path: str, status: int | None = None, headers: dict[str, str] | None = None
) -> Response:
    """Return the response for `error` on a route; 413, 429 and 503 carry Retry-After."""
    ERRORS.labels(type(error).__name__).inc()
    status = status or http_status(error)
    sent = dict(headers or {})
    if status in (413, 429, 503):
        wait = error.retry_after if isinstance(error, RequestTooLarge | TooManyRequests | Unavailable) else 1.0
        sent["retry-after"] = str(max(1, math.ceil(wait)))
    if isinstance(error, Unauthorized):
        sent["www-authenticate"] = "Bearer"
    if isinstance(error, RequestTooLarge | TooSlow):
        sent["connection"] = "close"  # the rest of the body is not read
    written = messages if path.startswith("/v1/messages") else openai
    return Response(written.error_body(error, status), status, sent, "application/json")


def stream_failure(error: ReefError, path: str) -> bytes:
    """The event that ends a stream in an error, in the shape of the API of `path`."""
    if path.startswith("/v1/messages"):
        return b"event: error\ndata: " + messages.error_body(error) + b"\n\n"
    if path.startswith("/v1/responses"):
        detail = openai.error_detail(error)
        event = {"type": "error", "sequence_number": 0, **detail, "error": detail}
        return b"event: error\ndata: " + openai.ENCODER.encode(event) + b"\n\n"
    return b"data: " + openai.error_body(error) + b"\n\n"


async def on_reef_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ReefError)
    if http_status(error) >= 500:
        log.warning("%s %s: %s: %s", request.method, request.url.path, type(error).__name__, error)
    return failure_response(error, request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """No such route (404), or not with this method (405)."""
    assert isinstance(error, HTTPException)
    what = "method not allowed for" if error.status_code == 405 else "no such route:"
    message = NotFound(f"{what} {request.method} {request.url.path}")
    return failure_response(message, request.url.path, error.status_code, dict(error.headers or {}))


async def on_client_disconnect(request: Request, error: Exception) -> Response:
    """The client left while it sent its body; nobody will read this."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def on_unexpected(request: Request, error: Exception) -> Response:
    """A bug of ours. The server logs the traceback; the client gets no details."""
    return failure_response(ReefError("internal error"), request.url.path, 500)
