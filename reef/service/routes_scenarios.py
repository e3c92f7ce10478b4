"""Scenarios, their chains and their records."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from reef.errors import InvalidRequest
from reef.runtime.interfaces import (
    Commit,
    Disposition,
    Generation,
    InferenceRecord,
    InstructionRecord,
    Record,
    RecordKind,
    Release,
    ReportRecord,
)
from reef.scenario.scenario import Scenario
from reef.service.auth import Caller
from reef.service.gateway import Gateway
from reef.service.request import NAME, checked_name, read_query
from reef.service.wire.base import decode_body

Body = TypeVar("Body")

MAX_PAGE = 1000

Name = Annotated[str, Meta(pattern=NAME)]
Limit = Annotated[int, Meta(ge=1, le=MAX_PAGE)]
Time = Annotated[float, Meta(ge=0, le=1e12)]


class NewScenario(Struct, forbid_unknown_fields=True):
    name: str


class RollbackBody(Struct, forbid_unknown_fields=True):
    release_id: Name | None = None  # None: the parent of the head


class PromoteBody(Struct, forbid_unknown_fields=True):
    release_id: Name | None = None
    job_id: Name | None = None


class NoBody(Struct, forbid_unknown_fields=True):
    pass


class ChainQuery(Struct, forbid_unknown_fields=True):
    limit: Limit = 100


class RecordQuery(Struct, forbid_unknown_fields=True):
    kind: RecordKind | None = None
    after: Annotated[int, Meta(ge=0, le=2**62)] = 0
    since: Time | None = None
    until: Time | None = None
    limit: Limit = 100
    detail: Literal["summary", "full"] = "summary"
    format: Literal["json", "jsonl"] = "json"


_NEW_SCENARIO = msgspec.json.Decoder(NewScenario)
_ROLLBACK = msgspec.json.Decoder(RollbackBody)
_PROMOTE = msgspec.json.Decoder(PromoteBody)
_NO_BODY = msgspec.json.Decoder(NoBody)
_ENCODER = msgspec.json.Encoder()


async def list_scenarios(request: Request) -> Response:
    """`GET /reef/scenarios`: all that the token may see, with their counts."""
    caller, every = Caller.of(request), Gateway.of(request).deployment.scenarios()
    scenarios = [scenario for scenario in every if caller.may_see(scenario.name)]
    return _json({"scenarios": [await scenario.status() for scenario in scenarios]})


async def create_scenario(request: Request) -> Response:
    """`POST /reef/scenarios`: 201 if it is new, 200 if it existed."""
    gateway = Gateway.of(request)
    name = checked_name((await _body(request, _NEW_SCENARIO)).name, "name")
    Caller.of(request).check_scenario(name)
    gateway.redaction.check_name(name, "name")
    existing = await gateway.existing(name)
    scenario = existing or await gateway.scenario(name)
    return _json(await scenario.status(), 200 if existing else 201)


async def scenario_status(request: Request) -> Response:
    """`GET /reef/scenarios/{scenario}`: its head, its counts, and what waits."""
    return _json(await (await _scenario(request)).status())


async def contract(request: Request) -> Response:
    """`GET /reef/scenarios/{scenario}/contract`: what the recipe wants of its client."""
    return _json(await (await _scenario(request)).contract())


async def releases(request: Request) -> Response:
    """`GET /reef/scenarios/{scenario}/releases`, newest first."""
    scenario, query = await _scenario(request), read_query(request, ChainQuery)
    found = await Gateway.of(request).deployment.storage.releases(scenario.name, query.limit)
    head = scenario.head.release_id
    return _json({"scenario": scenario.name, "head": head, "releases": [_release(release) for release in found]})


async def commits(request: Request) -> Response:
    """`GET /reef/scenarios/{scenario}/commits`, newest first."""
    scenario, query = await _scenario(request), read_query(request, ChainQuery)
    found = await Gateway.of(request).deployment.storage.commits(scenario.name, query.limit)
    return _json({"scenario": scenario.name, "commits": [_commit(commit) for commit in found]})


async def records(request: Request) -> Response:
    """`GET /reef/scenarios/{scenario}/records`: a page in order; `next_after` continues it, null at the end."""
    scenario, query = await _scenario(request), read_query(request, RecordQuery)
    storage = Gateway.of(request).deployment.storage
    found = await storage.page(
        scenario.name, kind=query.kind, after=query.after, since=query.since, until=query.until, limit=query.limit
    )
    fates = await storage.consumed(scenario.name, [record.record_id for record in found])
    shown = [_record(record, fates.get(record.record_id), query.detail == "full") for record in found]
    if query.format == "jsonl":
        lines = b"".join(_ENCODER.encode(record) + b"\n" for record in shown)
        return Response(lines, media_type="application/x-ndjson")
    following = found[-1].sequence if len(found) == query.limit else None
    return _json({"scenario": scenario.name, "records": shown, "next_after": following})


async def rollback(request: Request) -> Response:
    """`POST /reef/scenarios/{scenario}/rollback`: publish an earlier release's content as a new release."""
    body = await _body(request, _ROLLBACK)
    return _json(_release(await (await _scenario(request)).rollback(body.release_id)))


async def promote(request: Request) -> Response:
    """`POST /reef/scenarios/{scenario}/promote`: publish a kept candidate or a release by hand."""
    body = await _body(request, _PROMOTE)
    source = body.release_id or body.job_id
    if source is None or (body.release_id and body.job_id):
        raise InvalidRequest("give exactly one of release_id and job_id", "release_id")
    return _json(_release(await (await _scenario(request)).promote(source)))


async def update(request: Request) -> Response:
    """`POST /reef/scenarios/{scenario}/update`: train on what waits, without waiting for a full batch."""
    await _body(request, _NO_BODY)
    return _json(await (await _scenario(request)).update())


async def _scenario(request: Request) -> Scenario:
    """Raises NotFound."""
    name = checked_name(request.path_params["scenario"], "scenario")
    Caller.of(request).check_scenario(name)
    return await Gateway.of(request).deployment.scenario(name, create=False)


async def _body(request: Request, decoder: msgspec.json.Decoder[Body]) -> Body:
    return decode_body(decoder, await Gateway.of(request).body(request) or b"{}")


def _json(content: Any, status: int = 200) -> Response:
    return Response(_ENCODER.encode(content), status, media_type="application/json")


# ---------------------------------------------------------------------------------------------- views


def _release(release: Release) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(release)
    return shown


def _commit(commit: Commit) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(commit)
    del shown["algorithm_state"]  # the recipe's own, and as long as it likes
    shown["release"] = commit.release.release_id if commit.release is not None else None
    return shown


def _record(record: Record, fate: Disposition | None, full: bool) -> dict[str, Any]:
    if isinstance(record, InferenceRecord):
        shown: dict[str, Any] = {
            "route": record.route,
            "status": record.status,
            "release_id": record.release_id,
            "tags": record.tags,
            "parent_id": record.parent_id,
            "fork_of": record.fork_of,
            "redacted": record.redacted,
            "request": record.request.decode(errors="replace"),
            "response": record.response.decode(errors="replace"),
            "generations": [_generation(generation, full) for generation in record.generations],
        }
    elif isinstance(record, ReportRecord):
        shown = {
            "references": record.references,
            "score": record.score,
            "feedback": record.feedback,
            "error": record.error,
            "metadata": record.metadata,
        }
    else:
        shown = {"body": record.body}
    if not isinstance(record, InstructionRecord):
        shown["train"] = record.train
    return {
        "agent_record_id": record.record_id,
        "kind": _kind(record),
        "sequence": record.sequence,
        "created_at": record.created_at,
        "consumed": fate,
        **shown,
        **({"purged": record.purged} if not isinstance(record, InstructionRecord) and record.purged else {}),
    }


def _kind(record: Record) -> RecordKind:
    if isinstance(record, InstructionRecord):
        return RecordKind.INSTRUCTION
    return RecordKind.INFERENCE if isinstance(record, InferenceRecord) else RecordKind.REPORT


def _generation(generation: Generation, full: bool) -> dict[str, Any]:
    if full:
        everything: dict[str, Any] = msgspec.to_builtins(generation)
        return everything
    return {
        "ending": generation.ending,
        "prompt_tokens": len(generation.prompt_ids),
        "output_tokens": len(generation.output_ids),
        "cached_tokens": generation.cached_tokens,
        "spans": msgspec.to_builtins(generation.spans),
    }


_PREFIX = "/reef/scenarios"
ROUTES = [
    Route(_PREFIX, list_scenarios, methods=["GET"]),
    Route(_PREFIX, create_scenario, methods=["POST"]),
    Route(_PREFIX + "/{scenario}", scenario_status, methods=["GET"]),
    Route(_PREFIX + "/{scenario}/contract", contract, methods=["GET"]),
    Route(_PREFIX + "/{scenario}/releases", releases, methods=["GET"]),
    Route(_PREFIX + "/{scenario}/commits", commits, methods=["GET"]),
    Route(_PREFIX + "/{scenario}/records", records, methods=["GET"]),
    Route(_PREFIX + "/{scenario}/rollback", rollback, methods=["POST"]),
    Route(_PREFIX + "/{scenario}/promote", promote, methods=["POST"]),
    Route(_PREFIX + "/{scenario}/update", update, methods=["POST"]),
]
