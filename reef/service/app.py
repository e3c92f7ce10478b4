"""The HTTP application, and the server that runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from reef import tracing
from reef.errors import ConfigError, ReefError
from reef.service import (
    dashboard,
    failures,
    forwarding,
    logs,
    routes_health,
    routes_inference,
    routes_learning,
    routes_scenarios,
    scrape,
)
from reef.service.auth import Authentication
from reef.service.config import ReefConfig, ServiceConfig
from reef.service.deployment import Deployment
from reef.service.direct import DirectRoutes
from reef.service.gateway import Gateway
from reef.service.http import BoundedProtocol
from reef.service.observe import Observer
from reef.service.openapi import openapi_route
from reef.service.upstream import build

ABORT_SECONDS = 5.0
"""Seconds beyond the grace after which connections are dropped whose clients do not read or whose calls still run."""
CANCEL_SECONDS = 10
"""Seconds beyond the grace after which uvicorn cancels what is still running; by then nothing should be."""

YOUNG_OBJECTS = 50_000
"""New objects between two garbage collections. With Python's 700, requests in flight are looked through several times
while they wait, which takes a third of a request's processor time."""


def create_app(deployment: Deployment, config: ServiceConfig) -> Starlette:
    """Return the application; `state.observer` is the layer around it.

    Starting and closing the deployment is up to the caller.
    """
    routes = [
        *(routes_inference.ROUTES if deployment.provider is None else forwarding.ROUTES),
        *routes_learning.ROUTES,
        *routes_health.ROUTES,
        *routes_scenarios.ROUTES,
        *scrape.ROUTES,
        *dashboard.ROUTES,
    ]
    app = Starlette(
        routes=[*routes, openapi_route(routes, managed=deployment.provider is None)],
        exception_handlers={
            ReefError: failures.on_reef_error,
            HTTPException: failures.on_http_exception,
            ClientDisconnect: failures.on_client_disconnect,
            Exception: failures.on_unexpected,
        },
    )
    app.state.gateway = gateway = Gateway(deployment, config)
    inner = Authentication(DirectRoutes(app, routes), config.callers, config.max_concurrent_requests)
    paths = [route.path for route in app.routes if isinstance(route, Route) and not route.param_convertors]
    app.state.observer = Observer(dashboard.BrowserLogin(inner), paths, gateway.redaction.keeps)
    return app


class GatewayServer(uvicorn.Server):
    """uvicorn with Reef's shutdown: running requests get the grace, then they are cut and recorded as such.

    The address is taken at once, so that a port in use is known before a model is loaded; it answers from `serve` on.
    """

    def __init__(
        self, deployment: Deployment, config: ServiceConfig, on_ready: Callable[[GatewayServer], None] | None = None
    ) -> None:
        """Raises ConfigError if the address cannot be listened on."""
        app = create_app(deployment, config)
        super().__init__(
            uvicorn.Config(
                app.state.observer,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(config.shutdown_grace) + CANCEL_SECONDS,
            )
        )
        self.gateway: Gateway = app.state.gateway
        self._listening = _bind(config.host, config.port, share=config.share_port)
        self._on_ready = on_ready

    @property
    def url(self) -> str:
        """Where it listens, the port that the system chose included."""
        host, port = self._listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run_deployment(self) -> None:
        """Start the deployment, serve it until a signal or `should_exit`, close it."""
        with self._listening:
            await self.gateway.deployment.start()
            try:
                await self.serve([self._listening])
            finally:
                await self.gateway.deployment.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._on_ready is not None:
            self._on_ready(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.create_task(self._drain())
        try:
            await super().shutdown(sockets=sockets)
        finally:
            drain.cancel()
            await self.gateway.drain(0)

    async def _drain(self) -> None:
        grace = self.gateway.config.shutdown_grace
        abort_at = asyncio.get_running_loop().time() + grace + ABORT_SECONDS
        await self.gateway.drain(grace)
        await asyncio.sleep(abort_at - asyncio.get_running_loop().time())
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Stop on SIGINT and SIGTERM; unlike uvicorn's own, do not raise them again once all is closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(config: ReefConfig) -> None:
    """Serve the deployment that the configuration describes until SIGINT or SIGTERM.

    A second SIGINT cuts what still runs. Raises ConfigError, and whatever keeps the deployment from starting.
    """
    deployment = build(config)
    logs.configure(config.observability, deployment.redaction)
    if config.observability.trace_endpoint is not None:
        tracing.send_to(config.observability.trace_endpoint)
    server = GatewayServer(deployment, config.reef, _announce)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run_in_main_thread(server))
    finally:
        tracing.close()


async def _run_in_main_thread(server: GatewayServer) -> None:
    """While the deployment starts or closes, SIGTERM ends it as SIGINT does: by cancelling this task."""
    before = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        await server.run_deployment()
    finally:
        signal.signal(signal.SIGTERM, before)


def _announce(server: GatewayServer) -> None:
    gc.collect()
    gc.freeze()  # what was made until now stays, and is not looked through again and again
    gc.set_threshold(YOUNG_OBJECTS)
    print(ready_line(server.gateway, server.url), file=sys.stderr, flush=True)


def ready_line(gateway: Gateway, url: str) -> str:
    """What a person needs for the first request."""
    model = gateway.deployment.models()[0]
    scenario = gateway.config.default_scenario
    token = " -H 'authorization: Bearer TOKEN'" if gateway.config.tokens else ""
    return (
        f"reef: ready at {url}, model {model}, scenario {scenario}\n"
        f"reef: try  curl {url}/v1/chat/completions{token} -H 'content-type: application/json' "
        f"""-d '{{"model": "{model}", "max_tokens": 64, "messages": [{{"role": "user", "content": "Hello"}}]}}'"""
    )


def _bind(host: str, port: int, *, share: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(f"reef.host, reef.port: cannot listen on {host}:{port}: {error.strerror}") from error
    return listening
