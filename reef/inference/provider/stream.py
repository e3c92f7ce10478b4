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
    rb'"(?:finish_reason"\s*:\s*"|error"\s*:\s*[{"]'
    rb'|type"\s*:\s*"(?:message_delta|message_stop|error|response\.(?:completed|incomplete|failed))")'
)
"""With `[DONE]`: whether an event may be a last or terminal one. JSON escapes quotes, so that no text looks like it."""
_BOUNDARY = re.compile(rb"(?<=\n\n)|(?<=\n\r\n)")
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
        end = _boundary(data, len(data))
        self._partial = data[end:]
        begin = 0 if self._held else _boundary(data, _hint(data, end))
        if begin == end:
            return data[:end]
        return data[:begin] + b"".join([self._pass(event) for event in _BOUNDARY.split(data[begin:end]) if event])

    def finish(self, receipt: str | None) -> bytes:
        """What was held, the last regular event with the receipt if any; also what came of one that never ended."""
        if self._held and receipt is not None:
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
        begin, end = _data(event)
        if begin == end:
            return False, False
        text = event[begin:end]
        if text.strip() == b"[DONE]":
            self.ended = True
            return False, False
        content = _content(text)
        kind = content.get("type")
        if content.get("error") or kind in ("error", "response.failed"):
            self._failed = True
        if isinstance(kind, str):
            self.ended = self.ended or kind == "message_stop" or kind in _RESPONSE_ENDS
            return kind not in ("ping", "message_stop"), kind == "message_delta" or kind in _RESPONSE_ENDS
        choices = content.get("choices") or []
        return bool(choices), any(isinstance(one, dict) and one.get("finish_reason") for one in choices)


def _boundary(data: bytes, before: int) -> int:
    """Where the last whole event that ends there or earlier ends; 0 if there is none."""
    end = max(data.rfind(b"\n\n", 0, before) + 2, data.rfind(b"\n\r\n", 0, before) + 3)
    return end if end > 2 else 0


def _hint(data: bytes, end: int) -> int:
    """The first place before `end` where an event may be a last or terminal one; `end` if there is none."""
    done = data.find(b"[DONE]", 0, end)
    found = _HINT.search(data, 0, end)
    return min(done if done >= 0 else end, found.start() if found is not None else end)


def _data(event: bytes) -> tuple[int, int]:
    """Where the text of the event's first line of data begins and ends; both 0 if it has none."""
    begin = 0
    if not event.startswith(b"data:") and (begin := event.find(b"\ndata:") + 1) == 0:
        return 0, 0
    begin += len(b"data: ") if event[begin + 5 : begin + 6] == b" " else len(b"data:")
    end = event.find(b"\n", begin)
    end = end if end >= 0 else len(event)
    return begin, end - (event[end - 1 : end] == b"\r")


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
    begin, end = _data(event)
    if not (content := _content(event[begin:end])):
        return event
    where = content["response"] if isinstance(content.get("response"), dict) else content
    if where is content and "reef" not in content:  # by far the most: every byte stays
        end = begin + len(event[begin:end].rstrip()) - 1
        addition = b',"reef":{"agent_record_id":"' + receipt.encode() + b'"}'
        return event[:end] + addition + event[end:]
    where["reef"] = {"agent_record_id": receipt}
    return event[:begin] + json.dumps(content, separators=(",", ":")).encode() + event[end:]


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
