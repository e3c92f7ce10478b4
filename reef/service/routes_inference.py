"""Provider-shaped routes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from reef.service.exchange import Exchange
from reef.service.gateway import Gateway
from reef.service.request import read_body, read_head
from reef.service.wire import openai


async def chat_completions(request: Request) -> ASGIApp:
    """`POST /v1/chat/completions`. Any model name is accepted; the answer names the model that serves."""
    gateway = Gateway.of(request)
    head = read_head(request, gateway.config.default_scenario)
    body = await read_body(request, gateway.config.max_body_bytes)
    call = openai.parse_chat(body)
    return Exchange(gateway, head, call, openai.ChatWriter, "/v1/chat/completions", body)


async def models(request: Request) -> Response:
    """`GET /v1/models`"""
    gateway = Gateway.of(request)
    body = openai.models_body(gateway.deployment.models(), int(gateway.started_at))
    return Response(body, media_type="application/json")


ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
]
