"""Provider-shaped routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from reef.errors import Forbidden, InvalidRequest, NotFound
from reef.service.exchange import Exchange
from reef.service.gateway import Gateway
from reef.service.request import RequestHead, read_query
from reef.service.wire import messages, openai, responses
from reef.service.wire.base import Api, ChatCall, decode_body
from reef.service.wire.chat import CHAT
from reef.service.wire.completions import COMPLETIONS
from reef.service.wire.responses_writer import RESPONSES
from reef.service.wire.stored_chat import CompletionsQuery, MetadataBody
from reef.service.wire.stored_responses import ItemsQuery, ResponseQuery

_METADATA = msgspec.json.Decoder(MetadataBody)


def exchange_route(api: Api) -> Route:
    """The route that asks the model."""

    async def ask(request: Request) -> ASGIApp:
        """`POST`: ask the model. Any model name is accepted; the answer names the model that serves."""
        gateway = Gateway.of(request)
        head = gateway.serving_head(request)
        body = await gateway.body(request)
        call = await _prepared(gateway, head, api.parse(body))
        return Exchange(gateway, head, call, api, body)

    endpoint: Callable[[Request], Awaitable[ASGIApp]] = ask
    return Route(api.route, endpoint, methods=["POST"])


async def _prepared(gateway: Gateway, head: RequestHead, call: ChatCall) -> ChatCall:
    """The call after all that it goes on from, whose answers are at hand. Raises InvalidRequest, RequestTooLarge."""
    call = await gateway.recall.goes_on(head.scenario, call)
    if call.conversation is not None:
        gateway.check_messages(call.conversation, call.fields.get("messages", "messages"))
    await gateway.recall.prepare(head.scenario, call)
    return call


async def count_tokens(request: Request) -> Response:
    """`POST /v1/messages/count_tokens`: how long a prompt would be. Records nothing."""
    gateway = Gateway.of(request)
    head = gateway.serving_head(request)
    conversation = messages.parse_count(await gateway.body(request))
    gateway.check_messages(conversation, "messages")
    ids = await gateway.deployment.chat.prompt_ids(conversation, head.scenario)
    return _json(messages.count_body(len(ids)))


async def count_input_tokens(request: Request) -> Response:
    """`POST /v1/responses/input_tokens`: how long a prompt would be. Records nothing."""
    gateway = Gateway.of(request)
    head = gateway.serving_head(request)
    call = await _prepared(gateway, head, responses.parse_count(await gateway.body(request)))
    assert call.conversation is not None
    try:
        ids = await gateway.deployment.chat.prompt_ids(call.conversation, head.scenario)
    except InvalidRequest as error:
        error.field = call.field_of(error)
        raise
    return _json(openai.ENCODER.encode({"object": "response.input_tokens", "input_tokens": len(ids)}))


async def response(request: Request) -> Response:
    """`GET /v1/responses/{response_id}`: a stored response of this scenario."""
    gateway = Gateway.of(request)
    head = gateway.head(request)
    if read_query(request, ResponseQuery).stream:
        raise InvalidRequest("a stored response cannot be streamed again", "stream")
    found = await gateway.stored.response(head.scenario, request.path_params["response_id"])
    return _json(openai.ENCODER.encode(found.response))


async def response_items(request: Request) -> Response:
    """`GET /v1/responses/{response_id}/input_items`: all that a stored response was asked with."""
    gateway = Gateway.of(request)
    head = gateway.head(request)
    query = read_query(request, ItemsQuery)
    found = await gateway.stored.input_items(head.scenario, request.path_params["response_id"], query)
    return _json(openai.list_body(*found))


async def cancel_response(request: Request) -> Response:
    """`POST /v1/responses/{response_id}/cancel`: refused, for no response is made in the background."""
    gateway = Gateway.of(request)
    head = gateway.head(request)
    await gateway.stored.response(head.scenario, request.path_params["response_id"])
    raise InvalidRequest("Cannot cancel a synchronous response.")


async def delete_response(request: Request) -> Response:
    """`DELETE /v1/responses/{response_id}`: nobody finds this response of this scenario again."""
    gateway, head = Gateway.of(request), _recording_head(request)
    response_id = request.path_params["response_id"]
    await gateway.stored.delete_response(head.scenario, response_id)
    return _json(openai.ENCODER.encode({"id": response_id, "object": "response", "deleted": True}))


async def completions(request: Request) -> Response:
    """`GET /v1/chat/completions`: the stored completions among the newest records of this scenario."""
    gateway = Gateway.of(request)
    head = gateway.head(request)
    found = await gateway.stored.completions(head.scenario, read_query(request, CompletionsQuery))
    return _json(openai.list_body(*found))


async def completion(request: Request) -> Response:
    """`GET /v1/chat/completions/{completion_id}`: a stored completion of this scenario."""
    gateway = Gateway.of(request)
    head = gateway.head(request)
    found = await gateway.stored.completion(head.scenario, request.path_params["completion_id"])
    return _json(openai.ENCODER.encode(found))


async def completion_messages(request: Request) -> Response:
    """`GET /v1/chat/completions/{completion_id}/messages`: what a stored completion was asked with."""
    gateway = Gateway.of(request)
    head = gateway.head(request)
    query = read_query(request, openai.PageQuery)
    found = await gateway.stored.messages(head.scenario, request.path_params["completion_id"], query)
    return _json(openai.list_body(*found))


async def change_completion(request: Request) -> Response:
    """`POST /v1/chat/completions/{completion_id}`: give a stored completion other metadata."""
    gateway, head = Gateway.of(request), _recording_head(request)
    metadata = decode_body(_METADATA, await gateway.body(request)).metadata or {}
    if gateway.redaction.value(metadata) is not metadata:
        raise InvalidRequest("metadata holds what must not be stored", "metadata")
    found = await gateway.stored.change(head.scenario, request.path_params["completion_id"], metadata)
    return _json(openai.ENCODER.encode(found))


async def delete_completion(request: Request) -> Response:
    """`DELETE /v1/chat/completions/{completion_id}`: nobody finds this completion of this scenario again."""
    gateway, head = Gateway.of(request), _recording_head(request)
    completion_id = request.path_params["completion_id"]
    await gateway.stored.delete_completion(head.scenario, completion_id)
    return _json(openai.ENCODER.encode({"id": completion_id, "object": "chat.completion.deleted", "deleted": True}))


def _recording_head(request: Request) -> RequestHead:
    """`head` of a request that changes what is stored. Raises Forbidden where recording is off."""
    head = Gateway.of(request).head(request)
    if not head.allowed.record:
        raise Forbidden(f"recording is off for scenario {head.scenario!r}, and a change is recorded")
    return head


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


_RESPONSE = "/v1/responses/{response_id}"
_COMPLETION = "/v1/chat/completions/{completion_id}"
ROUTES = [
    *(exchange_route(api) for api in (CHAT, COMPLETIONS, RESPONSES, messages.MESSAGES)),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route(_RESPONSE, response, methods=["GET"]),
    Route(_RESPONSE, delete_response, methods=["DELETE"]),
    Route(f"{_RESPONSE}/input_items", response_items, methods=["GET"]),
    Route(f"{_RESPONSE}/cancel", cancel_response, methods=["POST"]),
    Route("/v1/chat/completions", completions, methods=["GET"]),
    Route(_COMPLETION, completion, methods=["GET"]),
    Route(_COMPLETION, change_completion, methods=["POST"]),
    Route(_COMPLETION, delete_completion, methods=["DELETE"]),
    Route(f"{_COMPLETION}/messages", completion_messages, methods=["GET"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{model:path}", model, methods=["GET"]),
]
