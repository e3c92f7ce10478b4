"""The coordinator over HTTP: served where it runs, found by name and called from the service.

    POST /<method>, body: msgpack [service, arguments...] ──► 200: msgpack result
                                                              4xx, 5xx: msgpack {"kind": "BarrierError", "message": ...}

Arguments and results are values of `interfaces`, encoded by their declared types; nothing is pickled. A caller shows
the token of the `Discovery` that the coordinator published; every answer names the incarnation that gave it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import http.client
import inspect
import logging
import os
import secrets
import socket
import typing
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from reef import errors
from reef.directories import replace_file
from reef.errors import Conflict, ReefError, StorageError, Unauthorized, WorkerDied
from reef.runtime.coordinator import Coordinator
from reef.runtime.deployment import Channel
from reef.runtime.interfaces import CoordinatorStatus

log = logging.getLogger("reef.remote")

METHODS = (
    "train",
    "adopt",
    "publish",
    "acknowledge",
    "reject",
    "remember",
    "recover",
    "marker",
    "status",
    "reports",
)
QUESTIONS = ("marker", "status", "reports")
"""What changes nothing, and so is answered to a service that was replaced, too."""

MSGPACK = "application/msgpack"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = {"status": 10.0, "marker": 10.0, "reports": 30.0}
LONGEST_CALL_SECONDS = 900.0
START_SECONDS = 10.0
SERVICE, INCARNATION = "x-reef-service", "x-reef-incarnation"


class Discovery(msgspec.Struct, kw_only=True, frozen=True):
    """Where a coordinator is."""

    host: str
    port: int
    token: str  # secret
    pid: int
    incarnation: str


Find = Callable[[], Awaitable[Discovery]]
"""Asked before each operation, so that a coordinator may be replaced by another. Raises ReefError with the reason."""


def publish_discovery(path: Path, found: Discovery) -> None:
    """Write the file that `read_discovery` reads; readable by its owner only. Raises StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(found), mode=0o600)
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror}") from error


def read_discovery(path: Path) -> Discovery:
    """Raises WorkerDied if no coordinator has said where it is, or what it said is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Discovery)
    except OSError as error:
        raise WorkerDied(
            f"no coordinator is known at {path} ({error.strerror}): start one with reef coordinator"
        ) from error
    except msgspec.MsgspecError as error:
        raise WorkerDied(f"{path} does not say where the coordinator is: {error}") from error


# ---------------------------------------------------------------------------------------------- the coordinator's side


class CoordinatorServer:
    """Serves one coordinator on threads of its own, from `start` to `close`."""

    def __init__(self, coordinator: Coordinator, host: str, port: int = 0, shown_host: str = "") -> None:
        """`shown_host` is how others reach `host`. Raises OSError if the address cannot be listened on."""
        self._coordinator = coordinator
        self._signatures = {name: _signature(name) for name in METHODS}
        self._service = ""  # the newest that recovered; an older one must not change anything any more
        self._lock = Lock()
        self._listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        incarnation = coordinator.status().incarnation
        self.discovery = Discovery(
            host=shown_host or host,
            port=self._listening.getsockname()[1],
            token=secrets.token_urlsafe(32),
            pid=os.getpid(),
            incarnation=incarnation,
        )
        app = Starlette(routes=[Route("/{method}", self._answer, methods=["POST"])])
        self._server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, ws="none", proxy_headers=False)
        )
        self._thread = Thread(target=self._run, name="coordinator-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(START_SECONDS)
        self._listening.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._listening]))

    async def _answer(self, request: Request) -> Response:
        headers = {INCARNATION: self.discovery.incarnation}
        try:
            content = await self._call(request)
        except ReefError as error:
            body = msgspec.msgpack.encode({"kind": type(error).__name__, "message": str(error)})
            return Response(body, errors.http_status(error), headers, MSGPACK)
        except Exception as error:  # a bug: the service must learn of it, and the coordinator goes on
            log.exception("%s failed", request.path_params["method"])
            body = msgspec.msgpack.encode({"kind": "ReefError", "message": f"{type(error).__name__}: {error}"})
            return Response(body, 500, headers, MSGPACK)
        return Response(content, 200, headers, MSGPACK)

    async def _call(self, request: Request) -> bytes:
        shown = request.headers.get("authorization", "")
        if not hmac.compare_digest(shown.encode(), f"Bearer {self.discovery.token}".encode()):
            raise Unauthorized("the coordinator's token is wrong")
        method = request.path_params["method"]
        if method not in self._signatures:
            raise errors.NotFound(f"the coordinator has no method {method!r}")
        try:
            arguments = msgspec.msgpack.decode(await request.body(), type=self._signatures[method])
        except msgspec.MsgspecError as error:
            raise errors.InvalidRequest(f"{method}: {error}") from error
        self._fence(method, request.headers.get(SERVICE, ""))
        result = await run_in_threadpool(getattr(self._coordinator, method), *arguments)
        return msgspec.msgpack.encode(result)

    def _fence(self, method: str, service: str) -> None:
        """The newest service that recovered is the one that may change things. Raises Conflict for others."""
        with self._lock:
            if method == "recover":
                self._service = service
            elif method not in QUESTIONS and service != self._service:
                raise Conflict("another service has taken this coordinator over")


def _signature(method: str) -> Any:
    """The types of a method's arguments, as one tuple type."""
    function = getattr(Coordinator, method)
    hints = typing.get_type_hints(function)
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return tuple.__class_getitem__(tuple(hints[name] for name in names))


def _result(method: str) -> Any:
    return typing.get_type_hints(getattr(Coordinator, method)).get("return", None)


# ---------------------------------------------------------------------------------------------- the service's side


class RemoteChannel(Channel):
    """Calls whichever coordinator `find` finds. A call that was sent is never sent again by itself."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._service = secrets.token_hex(8)
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="remote")
        self._results = {name: _result(name) for name in METHODS}

    async def start(self) -> None:
        await self.refresh()

    async def call(self, method: str, *args: Any) -> Any:
        found = await self._find()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._post, found, method, args)

    async def refresh(self) -> CoordinatorStatus:
        status: CoordinatorStatus = await self.call("status")
        return status

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _post(self, found: Discovery, method: str, args: tuple[Any, ...]) -> Any:
        where = f"the coordinator at {found.host}:{found.port}"
        connection = http.client.HTTPConnection(found.host, found.port, timeout=CONNECT_SECONDS)
        headers = {"authorization": f"Bearer {found.token}", SERVICE: self._service, "content-type": MSGPACK}
        try:
            with contextlib.closing(connection):
                connection.connect()
                _keep_alive(connection.sock, ANSWER_SECONDS.get(method, LONGEST_CALL_SECONDS))
                connection.request("POST", f"/{method}", msgspec.msgpack.encode(args), headers)
                answer = connection.getresponse()
                body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise WorkerDied(f"{where} did not answer {method}: {error or type(error).__name__}") from error
        if answer.headers.get(INCARNATION) != found.incarnation:
            raise WorkerDied(f"{where} is another one than was found")
        if answer.status != 200:
            raise _error(body, answer.status)
        return msgspec.msgpack.decode(body, type=self._results[method])


def _keep_alive(connection: socket.socket, seconds: float) -> None:
    """Bound the wait for the answer, and notice within half a minute that the other machine is gone."""
    connection.settimeout(seconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if (option := getattr(socket, name, None)) is not None:  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _error(body: bytes, status: int) -> ReefError:
    try:
        told = msgspec.msgpack.decode(body, type=dict[str, str])
    except msgspec.MsgspecError:
        return ReefError(f"the coordinator answered {status}")
    kind = getattr(errors, told.get("kind", ""), ReefError)
    if not (isinstance(kind, type) and issubclass(kind, ReefError)):
        kind = ReefError
    return kind(told.get("message", ""))
