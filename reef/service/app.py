"""The HTTP application, and the server that runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from reef.errors import ReefError
from reef.service import failures, routes_health, routes_inference, routes_learning, routes_scenarios
from reef.service.auth import Authentication
from reef.service.config import ReefConfig, ServiceConfig
from reef.service.gateway import Gateway
from reef.service.runtime import Deployment, build

SHUTDOWN_MARGIN = 10
"""Seconds beyond the grace in which cut requests are recorded and answered."""


def create_app(deployment: Deployment, config: ServiceConfig) -> Starlette:
    """Return the application. It starts the deployment when the server starts, and closes it last."""
    gateway = Gateway(deployment, config)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await deployment.start()
        try:
            yield
        finally:
            await deployment.close()

    app = Starlette(
        routes=[
            *routes_inference.ROUTES,
            *routes_learning.ROUTES,
            *routes_health.ROUTES,
            *routes_scenarios.ROUTES,
        ],
        middleware=[Middleware(Authentication, tokens=config.tokens)],
        exception_handlers={
            ReefError: failures.on_reef_error,
            HTTPException: failures.on_http_exception,
            ClientDisconnect: failures.on_client_disconnect,
            Exception: failures.on_unexpected,
        },
        lifespan=lifespan,
    )
    app.state.gateway = gateway
    return app


class GatewayServer(uvicorn.Server):
    """uvicorn with Reef's shutdown: running requests get the grace, then they are cut and recorded as such."""

    def __init__(self, app: Starlette, config: ServiceConfig, announce: bool = True) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(config.shutdown_grace) + SHUTDOWN_MARGIN,
            )
        )
        self._gateway: Gateway = app.state.gateway
        self._announce = announce

    @property
    def url(self) -> str:
        """Where it listens, the port that the system chose included."""
        bound = self.servers[0].sockets[0].getsockname()
        host = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        return f"http://{host}:{bound[1]}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and self._announce:
            print(ready_line(self._gateway, self.url), file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.create_task(self._gateway.drain(self._gateway.config.shutdown_grace))
        try:
            await super().shutdown(sockets=sockets)
        finally:
            drain.cancel()


def ready_line(gateway: Gateway, url: str) -> str:
    """What a person needs for the first request."""
    model = gateway.deployment.models()[0]
    scenario = gateway.config.default_scenario
    token = " -H 'authorization: Bearer TOKEN'" if gateway.config.tokens else ""
    return (
        f"reef: ready at {url}, model {model}, scenario {scenario}\n"
        f"reef: try  curl {url}/v1/chat/completions{token} -H 'content-type: application/json' "
        f"""-d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'"""
    )


def serve(config: ReefConfig) -> None:
    """Build the deployment that the configuration describes and serve it until SIGINT or SIGTERM.

    A second SIGINT stops without waiting. Raises ConfigError.
    """
    server = GatewayServer(create_app(build(config), config.reef), config.reef)
    server.run()
