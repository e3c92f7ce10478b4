"""Who calls, and what that caller may do. Without tokens everybody who reaches the socket may call: loopback only.

Only digests are kept: a token is known by the SHA-256 of what a client sends.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from reef.errors import Forbidden, ReefError, TooManyRequests, Unauthorized
from reef.service.config import Permissions, Role, TokenConfig
from reef.service.failures import failure_response

OPEN_PATHS = frozenset({"/healthz"})
_SCENARIOS = "/reef/scenarios"
_OF_A_SCENARIO = (f"{_SCENARIOS}/", "/reef/train", "/reef/report", "/v1/", "/openapi.json")
_EVERYTHING = frozenset(Role)


class Caller:
    """One token, or everybody where there is none."""

    def __init__(self, token: TokenConfig | None) -> None:
        self._digest = b"" if token is None else bytes.fromhex(token.digest.removeprefix("sha256:"))
        self._roles = _EVERYTHING if token is None else frozenset(token.roles)
        self._scenarios = None if token is None or token.scenarios is None else frozenset(token.scenarios)
        self.permissions = Permissions() if token is None else Permissions(record=token.record, train=token.train)
        self.running = 0  # requests

    @staticmethod
    def of(request: Request) -> Caller:
        caller: Caller = request.scope["reef.caller"]
        return caller

    def is_known_by(self, digest: bytes) -> bool:
        """In constant time."""
        return hmac.compare_digest(digest, self._digest)

    def may_see(self, scenario: str) -> bool:
        return self._scenarios is None or scenario in self._scenarios

    def check_scenario(self, scenario: str) -> None:
        """Raises Forbidden."""
        if not self.may_see(scenario):
            raise Forbidden(f"this token is not for scenario {scenario!r}")

    def check_path(self, method: str, path: str) -> None:
        """Raises Forbidden where the token's roles, or its scenarios, leave nothing to do."""
        wanted = _roles(method, path)
        if self._roles.isdisjoint(wanted):
            raise Forbidden(f"this token needs the role {' or '.join(sorted(wanted))} for {method} {path}")
        if self._scenarios is not None and path != _SCENARIOS and not path.startswith(_OF_A_SCENARIO):
            raise Forbidden(f"{path} is about all scenarios, and this token is not for all of them")


def _roles(method: str, path: str) -> frozenset[Role]:
    """Any of these opens the path."""
    if path.startswith("/v1/"):
        return frozenset({Role.INFER})
    if path == "/reef/report":
        return frozenset({Role.REPORT})
    if method == "GET" and path.startswith(_SCENARIOS) and path.endswith("/contract"):
        return frozenset({Role.REPORT, Role.ADMIN})
    return _EVERYTHING if path == "/openapi.json" else frozenset({Role.ADMIN})


class Authentication:
    """ASGI middleware: 401 without a known token, 403 where its role does not reach, 429 while it asks too much.

    A token comes as `Authorization: Bearer` or `x-api-key`.
    """

    def __init__(self, app: ASGIApp, tokens: Sequence[TokenConfig], most: int) -> None:
        """`most`: requests of one token at a time."""
        self._app = app
        self._callers = [Caller(token) for token in tokens]
        self._anybody = None if tokens else Caller(None)
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            caller = self._anybody or self._recognized(scope)
        except ReefError as error:
            await failure_response(error, scope["path"])(scope, receive, send)
            return
        if caller.running >= self._most:
            busy = TooManyRequests(f"at most {self._most} requests of one token at a time")
            await failure_response(busy, scope["path"])(scope, receive, send)
            return
        scope["reef.caller"] = caller
        caller.running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            caller.running -= 1

    def _recognized(self, scope: Scope) -> Caller:
        """Raises Unauthorized, Forbidden."""
        offered = _offered(scope["headers"])
        if offered is None:
            raise Unauthorized("no token: send Authorization: Bearer TOKEN")
        digest = hashlib.sha256(offered).digest()
        # Every token is compared, so that the time taken does not tell which one was near.
        known = [caller for caller in self._callers if caller.is_known_by(digest)]
        if not known:
            raise Unauthorized("unknown token")
        known[0].check_path(scope["method"], scope["path"])
        return known[0]


def _offered(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None
