"""Records as JSON lines for people and other programs."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from reef.runtime.interfaces import InferenceRecord, Record, RecordKind, ReportRecord, Storage


async def export_jsonl(
    storage: Storage,
    scenario: str,
    write: Callable[[str], object],
    *,
    kind: RecordKind | None = None,
    since: float | None = None,
    until: float | None = None,
    page_size: int = 100,
) -> int:
    """Call `write` with one line per record in order of sequence, each ending in a newline; return their number.

    Bodies become JSON where they parse, else text, else {"base64": ...}. Non-finite log-probabilities become null.
    """
    after = written = 0
    while records := await storage.page(scenario, kind=kind, after=after, since=since, until=until, limit=page_size):
        for line in await asyncio.to_thread(_lines, records):
            write(line)
        after = records[-1].sequence
        written += len(records)
    return written


def _lines(records: Sequence[Record]) -> list[str]:
    return [json.dumps(readable(record), separators=(",", ":")) + "\n" for record in records]


def readable(record: Record) -> dict[str, Any]:
    """The record as JSON values, its kind first."""
    if isinstance(record, ReportRecord):
        return {"kind": RecordKind.REPORT, **asdict(record)}
    if not isinstance(record, InferenceRecord):
        return {"kind": RecordKind.INSTRUCTION, **asdict(record)}
    fields = asdict(record)
    for generation in fields["generations"]:
        for name in ("logprobs", "sampled_logprobs"):
            generation[name] = [value if math.isfinite(value) else None for value in generation[name]]
    return {
        "kind": RecordKind.INFERENCE,
        **fields,
        "request": _body(record.request),
        "response": _body(record.response),
    }


def _body(body: bytes) -> Any:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body).decode()}
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
