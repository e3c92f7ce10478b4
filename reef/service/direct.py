"""The way of nearly every request past Starlette's router and its layers."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from reef.errors import ReefError
from reef.service import failures


class DirectRoutes:
    """ASGI application: `POST` on a path without parameters goes to its endpoint at once, with the same errors."""

    def __init__(self, app: Starlette, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._endpoints = {
            route.path: route.endpoint
            for route in routes
            if isinstance(route, Route) and route.methods == {"POST"} and not route.param_convertors
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if direct else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
            await response(scope, receive, send)
        except ReefError as error:
            await (await failures.on_reef_error(request, error))(scope, receive, send)
        except ClientDisconnect as error:
            await (await failures.on_client_disconnect(request, error))(scope, receive, send)
