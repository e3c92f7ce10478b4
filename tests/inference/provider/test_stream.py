"""Events pass as they came, whatever the pieces; the receipt is in the last regular one, and how it ended is known."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.errors import InvalidRequest
from reef.inference.provider.stream import EventStream, check_json, read_object
from tests.service.providers import DONE, USAGE, event, piece

CHAT = [piece(""), piece("Hel"), piece("lo"), piece(finish="stop"), USAGE, DONE]
TWO_CHOICES = [piece("a"), piece(finish="stop"), piece("b", index=1), piece(finish="length", index=1), DONE]
MESSAGES = [
    event({"type": "message_start", "message": {"stop_reason": None}}, "message_start"),
    event({"type": "ping"}, "ping"),
    event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}}, "content_block_delta"),
    event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}}, "message_delta"),
    event({"type": "message_stop"}, "message_stop"),
]
RESPONSES = [
    event({"type": "response.created", "response": {"status": "in_progress"}}, "response.created"),
    event({"type": "response.output_text.delta", "delta": "response.completed"}, "response.output_text.delta"),
    event({"type": "response.completed", "response": {"status": "completed"}}, "response.completed"),
]
RECEIPT = {"agent_record_id": "rec-1"}


def passed(stream: bytes, cuts: list[int] = (), receipt: str = "rec-1") -> tuple[EventStream, bytes, bytes]:
    """What passes at once and what is held, of a stream that comes in pieces cut there."""
    events, at_once = EventStream(), b""
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        at_once += events.feed(stream[start:end])
    return events, at_once, events.finish(receipt)


def with_receipt(event: bytes) -> bytes:
    return event.rstrip()[:-1] + b',"reef":{"agent_record_id":"rec-1"}}\n\n'


@pytest.mark.parametrize(
    ("stream", "last"), [(CHAT, 3), (TWO_CHOICES, 3), (MESSAGES, 3)], ids=["chat", "two choices", "messages"]
)
@given(cuts=st.lists(st.integers(0, 2000), max_size=8), carriage_returns=st.booleans())
def test_everything_passes_untouched_but_for_the_receipt(stream, last, cuts, carriage_returns):
    expected = [*stream[:last], with_receipt(stream[last]), *stream[last + 1 :]]
    sent = b"".join(stream)
    if carriage_returns:
        sent = sent.replace(b"\n", b"\r\n")
    events, at_once, held = passed(sent, cuts)
    assert (at_once + held).replace(b"\r\n", b"\n") == b"".join(expected)
    assert events.complete and at_once.replace(b"\r\n", b"\n") == b"".join(stream[:last])


def test_a_response_has_the_receipt_inside():
    events, at_once, held = passed(b"".join(RESPONSES))
    assert at_once == b"".join(RESPONSES[:2]) and events.complete
    assert json.loads(held.split(b"data: ")[1])["response"] == {"status": "completed", "reef": RECEIPT}


def test_a_receipt_of_another_reef_is_replaced():
    last = event({"choices": [{"finish_reason": "stop"}], "reef": {"agent_record_id": "theirs"}})
    _, _, held = passed(last + DONE)
    assert json.loads(held.split(b"\n\n")[0][6:])["reef"] == RECEIPT and b"theirs" not in held


def test_text_that_looks_like_an_end_is_text():
    text = 'data: [DONE]\n\n{"finish_reason": "stop", "type": "message_stop", "error": {"a": 1}}'
    stream = piece(text) + piece("more")
    events, at_once, held = passed(stream)
    assert (at_once, held, events.ended) == (stream, b"", False)


@pytest.mark.parametrize(
    "stream",
    [
        CHAT[:3],
        CHAT[:4],
        [*CHAT[:3], event({"error": {"message": "boom"}})],
        [*CHAT[:3], event({"error": {"message": "boom"}}), DONE],
        MESSAGES[:4],
        [*MESSAGES[:3], event({"type": "error", "error": {"type": "overloaded_error"}}, "error")],
        [*RESPONSES[:2], event({"type": "response.failed", "response": {"error": {}}}, "response.failed")],
        [b": only a comment\n\n"],
        [],
    ],
)
def test_without_its_terminal_event_or_after_an_error_a_stream_is_not_complete(stream):
    events, at_once, held = passed(b"".join(stream))
    assert not events.complete
    assert (at_once + held).count(b"\n\n") == b"".join(stream).count(b"\n\n")


def test_what_never_ends_is_kept_apart():
    events, at_once, held = passed(piece("a") + b'data: {"choi')
    assert (at_once, held, events.partial) == (piece("a"), b"", b'data: {"choi')


@pytest.mark.parametrize("body", [b"{}", b"[1]", b'"\\ud800"', b"1e999", b'{"a": 123456789012345678901234567890}'])
def test_json_of_any_kind_is_json(body):
    check_json(body)


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"a": ', b"{} x", b"[" * 100_000])
def test_what_is_not_json_is_refused(body):
    with pytest.raises(ValueError):
        check_json(body)
    with pytest.raises(InvalidRequest):
        read_object(body)


def test_a_request_must_be_an_object():
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        read_object(b"[1]")
