"""Can it serve and store, and what is it doing."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from reef.service.gateway import Gateway

_ENCODER = msgspec.json.Encoder()


async def healthz(request: Request) -> Response:
    """`GET /healthz`: 200 when it can serve and store, else 503 with the reasons. Needs no token."""
    reasons = await Gateway.of(request).health()
    body = _ENCODER.encode({"status": "unavailable" if reasons else "ok", "reasons": reasons})
    headers = {"retry-after": "1"} if reasons else None
    return Response(body, 503 if reasons else 200, headers, "application/json")


async def status(request: Request) -> Response:
    """`GET /reef/status`: what it serves, what it learns, and what waits."""
    gateway = Gateway.of(request)
    own = {
        "default_scenario": gateway.config.default_scenario,
        "models": gateway.deployment.models(),
        "in_flight": gateway.in_flight,
    }
    return Response(_ENCODER.encode({**await gateway.deployment.status(), **own}), media_type="application/json")


ROUTES = [
    Route("/healthz", healthz, methods=["GET"]),
    Route("/reef/status", status, methods=["GET"]),
]
