"""`GET /openapi.json`: what the routes take, from the types that check it (OpenAPI 3.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from reef import __version__
from reef.service import routes_learning, routes_scenarios
from reef.service.request import NAME, RECORD_HEADER, RECORD_SWITCH, SCENARIO_HEADER, TRAIN_SWITCH
from reef.service.wire import chat, completions, messages, openai, responses, stored_chat, stored_responses

_SCENARIO = "/reef/scenarios"
BODIES: dict[str, Any] = {
    "/v1/chat/completions": chat.ChatBody,
    "/v1/chat/completions/{completion_id}": stored_chat.MetadataBody,
    "/v1/completions": completions.CompletionBody,
    "/v1/responses": responses.ResponsesBody,
    "/v1/responses/input_tokens": responses.InputTokensBody,
    "/v1/responses/{response_id}/cancel": routes_scenarios.NoBody,
    "/v1/messages": messages.MessagesBody,
    "/v1/messages/count_tokens": messages.CountBody,
    "/reef/report": routes_learning.ReportBody,
    "/reef/train": dict[str, Any],
    _SCENARIO: routes_scenarios.NewScenario,
    f"{_SCENARIO}/{{scenario}}/rollback": routes_scenarios.RollbackBody,
    f"{_SCENARIO}/{{scenario}}/promote": routes_scenarios.PromoteBody,
    f"{_SCENARIO}/{{scenario}}/update": routes_scenarios.NoBody,
}
"""Of the routes that are posted to."""
QUERIES: dict[str, Any] = {
    "/v1/chat/completions": stored_chat.CompletionsQuery,
    "/v1/chat/completions/{completion_id}/messages": openai.PageQuery,
    "/v1/responses/{response_id}": stored_responses.ResponseQuery,
    "/v1/responses/{response_id}/input_items": stored_responses.ItemsQuery,
    f"{_SCENARIO}/{{scenario}}/releases": routes_scenarios.ChainQuery,
    f"{_SCENARIO}/{{scenario}}/commits": routes_scenarios.ChainQuery,
    f"{_SCENARIO}/{{scenario}}/records": routes_scenarios.RecordQuery,
}
ANSWERS: dict[str, Any] = {
    "/v1/chat/completions": chat.Completion,
    "/v1/completions": completions.Completion,
}
"""Of those that are not streamed, where one type says it all."""

_SWITCH = {"type": "string", "enum": ["on", "off"]}
_HEADERS = {
    SCENARIO_HEADER: {"type": "string", "pattern": NAME},
    RECORD_HEADER: {"type": "string", "pattern": NAME},
    RECORD_SWITCH: _SWITCH,
    TRAIN_SWITCH: _SWITCH,
}
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}


def openapi_route(routes: Sequence[Route], *, managed: bool = True) -> Route:
    """The route that describes `routes`, and itself. Without engines of our own a provider says what /v1 takes."""
    written: list[bytes] = []

    async def openapi(request: Request) -> Response:
        """`GET /openapi.json`: this description."""
        if not written:  # the schemas take a while, and most deployments are never asked
            written.append(msgspec.json.encode(describe([*routes, found], managed=managed)))
        return Response(written[0], media_type="application/json")

    found = Route("/openapi.json", openapi, methods=["GET"])
    return found


def describe(routes: Sequence[Route], *, managed: bool = True) -> dict[str, Any]:
    kinds = [*BODIES.values(), *QUERIES.values(), *ANSWERS.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(id, kinds), schemas, strict=True))
    if not managed:
        schema_of |= {id(kind): {"type": "object"} for path, kind in BODIES.items() if path.startswith("/v1/")}
        schema_of |= {id(kind): {} for kind in ANSWERS.values()}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, method, path, schema_of, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Reef", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}, {}],
    }


def _operation(
    route: Route, method: str, path: str, schema_of: dict[int, Any], components: dict[str, Any]
) -> dict[str, Any]:
    answer = schema_of[id(ANSWERS[path])] if method == "POST" and path in ANSWERS else {}
    summary = " ".join((route.endpoint.__doc__ or "").split())
    found: dict[str, Any] = {
        "summary": re.sub(r"^`[^`]*`[:,]? *", "", summary) or path,
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "parameters": _parameters(method, path, schema_of, components),
        "responses": {
            "2XX": {"description": "done", "content": {"application/json": {"schema": answer}}},
            "4XX": {"description": "refused, in the shape of the API", "content": _json({"$ref": _ref("Error")})},
        },
    }
    if method == "POST" and path in BODIES:
        found["requestBody"] = {"required": True, "content": _json(schema_of[id(BODIES[path])])}
    return found


def _parameters(method: str, path: str, schema_of: dict[int, Any], components: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if method == "GET" and path in QUERIES:
        query = components[schema_of[id(QUERIES[path])]["$ref"].rpartition("/")[2]]
        for name, schema in query["properties"].items():
            style = {"style": "deepObject", "explode": True} if name == "metadata" else {}
            found.append({"name": name, "in": "query", "schema": schema, **style})
    if path.startswith(("/v1/responses", "/v1/chat/completions")) or (
        method == "POST" and not path.startswith(_SCENARIO)
    ):
        found += [{"name": name, "in": "header", "schema": schema} for name, schema in _HEADERS.items()]
    return found


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> str:
    return f"#/components/schemas/{name}"
