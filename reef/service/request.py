"""What a request says besides its body: scenario, tags, ids, its query; and reading the body within its limit."""

from __future__ import annotations

import asyncio
import os
import re
import time
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from reef.errors import InvalidRequest, RequestTooLarge, TooSlow
from reef.service.config import Permissions
from reef.service.wire.base import locate

Query = TypeVar("Query")

RECORD_SWITCH = "x-reef-record"
TRAIN_SWITCH = "x-reef-train"
SCENARIO_HEADER = "x-reef-scenario"
RECORD_HEADER = "x-reef-record-id"
RECEIPT_HEADER = "x-reef-agent-record-id"
TAG_PREFIX = "x-reef-tag-"
BODY_ARRIVED = "reef.arrived"
"""In the scope of a request whose body is here as a whole: reading it waits for nobody."""
MAX_TAGS = 32
MAX_TAG_LENGTH = 1024

NAME = r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,128}$"
"""What scenarios, records and releases are called."""

EVERYTHING = Permissions()

_NAME = re.compile(NAME.strip("^$"), re.ASCII)


@dataclass(slots=True, frozen=True)
class RequestHead:
    """The Reef headers of one request, validated."""

    scenario: str
    record_id: str | None  # the client's own id, which makes repeating the request harmless
    tags: dict[str, str]
    allowed: Permissions = EVERYTHING  # by deployment, scenario, token and the request itself


def read_head(request: Request, default_scenario: str) -> RequestHead:
    """Raises InvalidRequest naming the header."""
    scenario: str | None = None
    record_id: str | None = None
    tags: dict[str, str] = {}
    record = train = True
    for raw, value in request.scope["headers"]:
        if not raw.startswith(b"x-reef-"):
            continue
        header = raw.decode("latin-1")
        if header == SCENARIO_HEADER:
            scenario = _once(scenario, checked_name(value.decode("latin-1"), header), header)
        elif header == RECORD_HEADER:
            record_id = _once(record_id, checked_name(value.decode("latin-1"), header), header)
        elif header == RECORD_SWITCH:
            record = _switch(value, header) and record
        elif header == TRAIN_SWITCH:
            train = _switch(value, header) and train
        elif header.startswith(TAG_PREFIX):
            tags[checked_name(header.removeprefix(TAG_PREFIX), header)] = _tag_value(value, header)
    if len(tags) > MAX_TAGS:
        raise InvalidRequest(f"at most {MAX_TAGS} tags, got {len(tags)}", TAG_PREFIX + "*")
    allowed = EVERYTHING if record and train else Permissions(record=record, train=train)
    return RequestHead(scenario or default_scenario, record_id, tags, allowed)


def _switch(value: bytes, header: str) -> bool:
    if (word := value.decode("latin-1").strip().lower()) not in ("on", "off"):
        raise InvalidRequest(f"{header} must be on or off, got {word[:140]!r}", header)
    return word == "on"


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def checked_name(text: str, field: str) -> str:
    """Return `text` if it is a valid scenario name or record id. Raises InvalidRequest naming `field`."""
    if not is_name(text):
        raise InvalidRequest(
            f"{field} must be 1 to 128 characters of A-Z a-z 0-9 . _ - and not only dots, got {text[:140]!r}", field
        )
    return text


def _once(earlier: str | None, value: str, header: str) -> str:
    if earlier is not None and earlier != value:
        raise InvalidRequest(f"{header} is given twice with different values", header)
    return value


def _tag_value(value: bytes, header: str) -> str:
    if len(value) > MAX_TAG_LENGTH:
        raise InvalidRequest(f"{header} must have at most {MAX_TAG_LENGTH} bytes, got {len(value)}", header)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def read_query(request: Request, kind: type[Query]) -> Query:
    """The query, validated; `a[b]=c` is a mapping in the field a. Raises InvalidRequest naming the field."""
    given: dict[str, Any] = {}
    for name, value in request.query_params.items():
        outer, bracket, key = name.partition("[")
        if bracket and key.endswith("]"):
            inner = given.get(outer)
            given[outer] = {**(inner if isinstance(inner, dict) else {}), key[:-1]: value}
        else:
            given[name] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        message, field = locate(str(error))
        raise InvalidRequest(message, field) from error


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """Read the whole body, but stop at the limit. Raises RequestTooLarge, TooSlow, ClientDisconnect."""
    if BODY_ARRIVED in request.scope:
        return await _read(request, limit)
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, limit)
    except TimeoutError:
        raise TooSlow(f"the body did not arrive within {seconds:g} seconds") from None


async def _read(request: Request, limit: int) -> bytes:
    receive = request.receive
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is over the limit of {limit} bytes")


def new_record_id() -> str:
    """A fresh id; ids sort by time, which keeps an index on them compact."""
    return f"{time.time_ns():016x}{random_name()}"


_names: list[str] = []  # random ones, not given out yet: to ask the system for each costs as much as the rest of an id
os.register_at_fork(after_in_child=_names.clear)


def random_name() -> str:
    """16 characters that nobody can guess. Any thread may call."""
    try:
        return _names.pop()
    except IndexError:
        found = os.urandom(8 * 256).hex()
        _names.extend(found[start : start + 16] for start in range(0, len(found), 16))
        return random_name()
