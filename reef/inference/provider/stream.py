"""Server-sent events of a provider, passed on as they come but for the end, which waits until the record is durable.

::

    event, event, ...            sent at once, as whole events
    last regular event           held; the receipt goes into it. Another regular event: it was not the last
    usage, terminal event        held behind it
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from reef.errors import InvalidRequest

_HINT = re.compile(
    rb'"finish_reason"\s*:\s*"|"error"\s*:\s*[{"]|^data:\s*\[DONE\]'
    rb'|"type"\s*:\s*"(?:message_delta|message_stop|error|response\.(?:completed|incomplete|failed))"',
    re.MULTILINE,
)
"""Whether an event may be a last or terminal one. JSON escapes quotes and newlines, so that no text looks like it."""
_BOUNDARY = re.compile(rb"(?<=\n\n)|(?<=\n\r\n)")
_DATA = re.compile(rb"^data: ?(.*?)\r?$", re.MULTILINE)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed")


class EventStream:
    """The stream of one answer. It is complete once its terminal event came, and nothing had failed before."""

    def __init__(self) -> None:
        self._partial = b""  # of the newest event
        self._held: list[bytes] = []  # events; the first is the last regular one, if it is a candidate for that
        self._failed = False
        self.ended = False  # the terminal event came

    @property
    def complete(self) -> bool:
        return self.ended and not self._failed

    def feed(self, data: bytes) -> bytes:
        """What may be sent of it, and of what was held, now."""
        data = self._partial + data
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3)
        if end < 3:
            self._partial = data
            return b""
        self._partial = data[end:]
        whole = data[:end]
        if not self._held and _HINT.search(whole) is None:
            return whole
        return b"".join(self._pass(event) for event in _BOUNDARY.split(whole) if event)

    def finish(self, receipt: str) -> bytes:
        """What was held, with the receipt in the last regular event; also what came of one that never ended."""
        if self._held:
            self._held[0] = _with_receipt(self._held[0], receipt)
        held, self._held = b"".join(self._held), []
        return held

    @property
    def partial(self) -> bytes:
        """What came of an event that has not ended."""
        return self._partial

    def _pass(self, event: bytes) -> bytes:
        regular, last = self._look(event)
        released = b""
        if regular and self._held:
            released, self._held = b"".join(self._held), []
        if last or self._held or self.ended:
            self._held.append(event)
            return released
        return released + event

    def _look(self, event: bytes) -> tuple[bool, bool]:
        """Whether this is a regular event, and whether it may be the last one of these. Notes how the stream ends."""
        found = _DATA.search(event)
        if found is None:
            return False, False
        if found[1].strip() == b"[DONE]":
            self.ended = True
            return False, False
        content = _content(found[1])
        kind = content.get("type")
        if content.get("error") or kind in ("error", "response.failed"):
            self._failed = True
        if isinstance(kind, str):
            self.ended = self.ended or kind == "message_stop" or kind in _RESPONSE_ENDS
            return kind not in ("ping", "message_stop"), kind == "message_delta" or kind in _RESPONSE_ENDS
        choices = content.get("choices") or []
        return bool(choices), any(isinstance(one, dict) and one.get("finish_reason") for one in choices)


def _content(data: bytes) -> dict[str, Any]:
    try:
        found = _loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _loads(data: bytes) -> Any:
    """JSON as the standard library reads it; raises ValueError. msgspec refuses lone surrogates and large numbers."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        try:
            return json.loads(data)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


def _with_receipt(event: bytes, receipt: str) -> bytes:
    """The event as it was, but for one more key in its object; in the response itself where the event has one."""
    found = _DATA.search(event)
    if found is None or not (content := _content(found[1])):
        return event
    where = content["response"] if isinstance(content.get("response"), dict) else content
    if where is content and "reef" not in content:  # by far the most: every byte stays
        end = found.start(1) + len(found[1].rstrip()) - 1
        addition = b',"reef":{"agent_record_id":"' + receipt.encode() + b'"}'
        return event[:end] + addition + event[end:]
    where["reef"] = {"agent_record_id": receipt}
    return event[: found.start(1)] + json.dumps(content, separators=(",", ":")).encode() + event[found.end(1) :]


def read_object(body: bytes) -> dict[str, msgspec.Raw]:
    """The top of a JSON object, its values as they are. Raises InvalidRequest."""
    try:
        return _OBJECT.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest("the body must be a JSON object") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def check_json(body: bytes) -> None:
    """Raises ValueError for what is not JSON."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.MsgspecError, RecursionError):
        _loads(body)
