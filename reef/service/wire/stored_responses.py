"""Stored responses (platform.openai.com/docs/api-reference/responses/get), read from what was recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from reef.service.wire.openai import PageQuery
from reef.service.wire.responses import ID_PREFIX, decode_responses, input_items, receipt_of

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class ResponseQuery(Struct, forbid_unknown_fields=True):
    stream: bool = False
    starting_after: int | None = None  # of a stream, as is the next
    include_obfuscation: bool | None = None
    include: Any = None  # nothing is left out


class ItemsQuery(PageQuery, forbid_unknown_fields=True):
    order: Literal["asc", "desc"] = "desc"
    include: Any = None


@dataclass(slots=True, frozen=True)
class Stored:
    """An answer as it was recorded: what it was asked after, and the response object itself."""

    items: list[dict[str, Any]]
    goes_on_from: str | None
    response: dict[str, Any]

    @property
    def receipt(self) -> str:
        receipt: str = self.response["id"].removeprefix(ID_PREFIX)
        return receipt

    @property
    def listed(self) -> list[dict[str, Any]]:
        """The items that it was asked with, as they are listed: each with an id."""
        return [_listed(item, f"{self.receipt}_in{number}") for number, item in enumerate(self.items)]

    def item(self, name: str) -> dict[str, Any] | None:
        """The item of its input or output that has this id."""
        everything: Sequence[dict[str, Any]] = (*self.listed, *self.response["output"])
        return next((dict(item) for item in everything if item["id"] == name), None)


def read_stored(request: bytes, response: bytes) -> Stored | None:
    """None: it is not to be found again, because its client said so or because it never came to an end."""
    given = decode_responses(request)
    if given.store is False:
        return None
    found = _response_object(response)
    if found is None or "output" not in found:
        return None
    return Stored(input_items(given), receipt_of(given.previous_response_id), found)


def _response_object(response: bytes) -> dict[str, Any] | None:
    if response.startswith(b"{"):
        whole: dict[str, Any] = json.loads(response)
        return whole
    name, _, data = response.rstrip().rpartition(b"\n\n")[2].partition(b"\ndata: ")
    if name not in (b"event: response.completed", b"event: response.incomplete"):
        return None
    last: dict[str, Any] = json.loads(data)["response"]
    return last


def _listed(item: dict[str, Any], number: str) -> dict[str, Any]:
    said = {name: value for name, value in item.items() if value is not None}
    kind = said.get("type", "message" if "role" in said else "item_reference")
    if kind == "item_reference":
        return {"type": kind, **said}
    if kind == "message" and isinstance(text := said["content"], str):
        output = {"type": "output_text", "text": text, "annotations": []}
        said["content"] = [output if said["role"] == "assistant" else {"type": "input_text", "text": text}]
    if kind == "reasoning":
        said.setdefault("summary", [])
    return {"type": kind, "id": f"{_PREFIXES[kind]}_{number}", "status": "completed", **said}
