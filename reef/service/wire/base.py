"""What every provider-shaped wire format translates to, and how it writes an answer back."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from reef.errors import InvalidRequest, ReefError
from reef.inference.chat.messages import Message
from reef.inference.chat.service import Choice, Delta
from reef.runtime.interfaces import SamplingParams

Body = TypeVar("Body")


@dataclass(slots=True, kw_only=True)
class ChatCall:
    """A validated inference request, whatever API it came through."""

    messages: list[Message]
    sampling: SamplingParams
    max_tokens: int | None  # None: what the context leaves
    max_tokens_field: str  # what this API calls it
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False


class Writer(ABC):
    """Writes one answer in the format of one API: either `whole`, or `opening`, `delta`s and a last `closing`.

    All return the exact bytes of (a part of) the response body.
    """

    def __init__(self, call: ChatCall, record_id: str, created: int, model: str) -> None:
        self.call = call
        self.record_id = record_id
        self.created = created
        self.model = model

    @abstractmethod
    def whole(self, choices: Sequence[Choice], logprobs: Sequence[list[Delta]]) -> bytes:
        """The body of an answer that is not streamed; `logprobs` holds each choice's deltas."""

    @abstractmethod
    def opening(self) -> bytes: ...

    @abstractmethod
    def delta(self, delta: Delta) -> bytes:
        """What a delta adds, without its ending. May be empty."""

    @abstractmethod
    def ended(self, delta: Delta) -> bytes:
        """The end of one choice while others go on."""

    @abstractmethod
    def closing(self, delta: Delta, choices: Sequence[Choice]) -> bytes:
        """The end of the last choice, with the receipt, and all that follows it."""

    @abstractmethod
    def failure(self, error: ReefError) -> bytes:
        """The event that ends a stream in an error."""


def decode_body(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Decode and validate a JSON body. Raises InvalidRequest with the path of the offending field."""
    try:
        return decoder.decode(body)
    except RecursionError as error:
        raise InvalidRequest("the JSON is nested too deeply") from error
    except msgspec.ValidationError as error:
        message, field = locate(str(error))
        raise InvalidRequest(message, field) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_FIELD = re.compile(r"(?:unknown|required) field `(.*)`")


def locate(complaint: str) -> tuple[str, str | None]:
    """Split a msgspec complaint into what is wrong and the dotted path of the field it is wrong with."""
    field = ""
    if path := _PATH.search(complaint):
        complaint, field = complaint[: path.start()], path[1]
    if name := _FIELD.search(complaint):
        field = f"{field}.{name[1]}" if field else name[1]
    return complaint, field.replace("[...]", "") or None  # that is how a key of a mapping is shown
