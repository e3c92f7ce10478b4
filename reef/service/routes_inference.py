"""Provider-shaped routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from reef.errors import Forbidden, InvalidRequest, NotFound
from reef.service.exchange import Exchange
from reef.service.gateway import Gateway
from reef.service.wire import messages, openai
from reef.service.wire.base import Api
from reef.service.wire.chat import CHAT
from reef.service.wire.completions import COMPLETIONS
from reef.service.wire.responses_writer import RESPONSES


def exchange_route(api: Api) -> Route:
    """The route that asks the model."""

    async def ask(request: Request) -> ASGIApp:
        """`POST`: ask the model. Any model name is accepted; the answer names the model that serves."""
        gateway = Gateway.of(request)
        head = gateway.serving_head(request)
        body = await gateway.body(request)
        call = await gateway.recall.goes_on(head.scenario, api.parse(body))
        if call.conversation is not None:
            gateway.check_messages(call.conversation, call.fields.get("messages", "messages"))
        await gateway.recall.prepare(head.scenario, call)
        return Exchange(gateway, head, call, api, body)

    endpoint: Callable[[Request], Awaitable[ASGIApp]] = ask
    return Route(api.route, endpoint, methods=["POST"])


async def count_tokens(request: Request) -> Response:
    """`POST /v1/messages/count_tokens`: how long a prompt would be. Records nothing."""
    gateway = Gateway.of(request)
    head = gateway.serving_head(request)
    conversation = messages.parse_count(await gateway.body(request))
    gateway.check_messages(conversation, "messages")
    ids = await gateway.deployment.chat.prompt_ids(conversation, head.scenario)
    return _json(messages.count_body(len(ids)))


async def response(request: Request) -> Response:
    """`GET /v1/responses/{response_id}`: a stored response of this scenario."""
    gateway = Gateway.of(request)
    head = gateway.head(request)
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise InvalidRequest("a stored response cannot be streamed again", "stream")
    found = await gateway.recall.response(head.scenario, request.path_params["response_id"])
    return _json(openai.ENCODER.encode(found))


async def delete_response(request: Request) -> Response:
    """`DELETE /v1/responses/{response_id}`: nobody finds this response of this scenario again."""
    gateway = Gateway.of(request)
    head = gateway.head(request)
    if not head.allowed.record:
        raise Forbidden(f"recording is off for scenario {head.scenario!r}, and a deletion is recorded")
    response_id = request.path_params["response_id"]
    await gateway.recall.delete(head.scenario, response_id)
    return _json(openai.ENCODER.encode({"id": response_id, "object": "response", "deleted": True}))


async def models(request: Request) -> Response:
    """`GET /v1/models`, in the shape of the API that asks."""
    gateway = Gateway.of(request)
    names = gateway.deployment.models()
    if "anthropic-version" in request.headers:
        return _json(messages.models_body(names, _time(gateway.started_at)))
    return _json(openai.models_body(names, int(gateway.started_at)))


async def model(request: Request) -> Response:
    """`GET /v1/models/{model}`: the model that serves, by its name."""
    gateway = Gateway.of(request)
    name = request.path_params["model"]
    if name not in gateway.deployment.models():
        raise NotFound(f"there is no model {name!r}")
    if "anthropic-version" in request.headers:
        return _json(openai.ENCODER.encode(messages.model_body(name, _time(gateway.started_at))))
    return _json(openai.ENCODER.encode(openai.model_body(name, int(gateway.started_at))))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


ROUTES = [
    *(exchange_route(api) for api in (CHAT, COMPLETIONS, RESPONSES, messages.MESSAGES)),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/responses/{response_id}", response, methods=["GET"]),
    Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{model:path}", model, methods=["GET"]),
]
