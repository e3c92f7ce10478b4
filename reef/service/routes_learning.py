"""Reports and training instructions."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from reef.errors import InvalidRequest, UnknownReceipt
from reef.runtime.interfaces import InferenceRecord, InstructionRecord, ReportRecord
from reef.service.gateway import Gateway
from reef.service.observe import working_for
from reef.service.request import RECORD_HEADER, checked_name, new_record_id, read_body, read_head
from reef.service.wire.base import decode_body

MAX_REFERENCES = 10_000

RecordId = Annotated[str, Meta(min_length=1, max_length=128)]


class ReportBody(Struct, forbid_unknown_fields=True):
    references: Annotated[list[RecordId], Meta(min_length=1, max_length=MAX_REFERENCES)]
    score: float | None = None
    feedback: str | dict[str, Any] | None = None
    error: str | None = None
    metadata: dict[str, Any] | None = None
    agent_record_id: RecordId | None = None


_REPORT = msgspec.json.Decoder(ReportBody)
_INSTRUCTION = msgspec.json.Decoder(dict[str, Any])
_ENCODER = msgspec.json.Encoder()


async def report(request: Request) -> Response:
    """`POST /reef/report`: store feedback on answers of one scenario; never creates the scenario."""
    gateway = Gateway.of(request)
    head = read_head(request, gateway.config.default_scenario)
    body = decode_body(_REPORT, await read_body(request, gateway.config.max_body_bytes))
    record = ReportRecord(
        record_id=_record_id(body.agent_record_id, head.record_id),
        scenario=head.scenario,
        created_at=time.time(),
        references=body.references,
        score=body.score,
        feedback=body.feedback,
        error=body.error,
        metadata=body.metadata or {},
    )
    working_for(head.scenario, record.record_id)
    if body.score is not None and body.error is not None:
        raise InvalidRequest("score and error exclude each other: a grader that failed has no score", "error")
    scenario = await gateway.existing(head.scenario)
    if scenario is None:
        raise UnknownReceipt(f"there is no scenario {head.scenario!r} that could hold this answer", "references[0]")
    await _check_references(gateway, record)
    if body.score is None and body.error is None and body.feedback is None:
        raise InvalidRequest("a report says something: give score, feedback or error", "score")
    stored = await scenario.report(record)
    return _json({"agent_record_id": stored.record_id, "scenario": stored.scenario, "references": stored.references})


async def train(request: Request) -> Response:
    """`POST /reef/train`: store a training instruction; its body is the recipe's to understand."""
    gateway = Gateway.of(request)
    head = read_head(request, gateway.config.default_scenario)
    body = decode_body(_INSTRUCTION, await read_body(request, gateway.config.max_body_bytes))
    own_id = body.pop("agent_record_id", None)
    if own_id is not None and not isinstance(own_id, str):
        raise InvalidRequest(f"agent_record_id must be a string, got {own_id!r}", "agent_record_id")
    record_id = _record_id(own_id, head.record_id)
    working_for(head.scenario, record_id)
    scenario = await gateway.deployment.scenario(head.scenario, create=True)
    record = InstructionRecord(record_id=record_id, scenario=head.scenario, created_at=time.time(), body=body)
    stored = await scenario.instruct(record)
    return _json({"agent_record_id": stored.record_id, "scenario": stored.scenario})


def _record_id(in_body: str | None, in_header: str | None) -> str:
    if in_body is None:
        return in_header or new_record_id()
    if in_header is not None and in_header != in_body:
        raise InvalidRequest(f"agent_record_id and {RECORD_HEADER} differ", "agent_record_id")
    return checked_name(in_body, "agent_record_id")


async def _check_references(gateway: Gateway, record: ReportRecord) -> None:
    if len(set(record.references)) != len(record.references):
        raise InvalidRequest("references must not name a receipt twice", "references")
    places = {
        receipt: index
        for index, receipt in enumerate(record.references)
        if not gateway.remembers(record.scenario, receipt)
    }
    if not places:
        return
    found = await gateway.deployment.storage.get(record.scenario, list(places))
    for receipt, index in places.items():
        if not isinstance(found.get(receipt), InferenceRecord):
            raise UnknownReceipt(f"scenario {record.scenario!r} holds no answer {receipt!r}", f"references[{index}]")


def _json(content: dict[str, Any]) -> Response:
    return Response(_ENCODER.encode(content), media_type="application/json")


ROUTES = [
    Route("/reef/report", report, methods=["POST"]),
    Route("/reef/train", train, methods=["POST"]),
]
