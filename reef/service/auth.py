"""Bearer tokens. Without any configured, everybody who reaches the socket may call: loopback only."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from reef.errors import Unauthorized
from reef.service.failures import failure_response

OPEN_PATHS = frozenset({"/healthz"})


class Authentication:
    """ASGI middleware: 401 unless `Authorization: Bearer` or `x-api-key` carries one of the tokens."""

    def __init__(self, app: ASGIApp, tokens: Sequence[str]) -> None:
        self._app = app
        self._tokens = [token.encode() for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._tokens and scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            offered = _offered(scope["headers"])
            if offered is None or not self._known(offered):
                message = "no token: send Authorization: Bearer TOKEN" if offered is None else "unknown token"
                await failure_response(Unauthorized(message), scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _known(self, offered: bytes) -> bool:
        # Every token is compared, so that the time taken does not tell which one was near.
        return sum([hmac.compare_digest(offered, token) for token in self._tokens]) > 0


def _offered(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None
