"""What every provider-shaped wire format translates to, and how it writes an answer back."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from reef.errors import InvalidRequest, ReefError, RequestTooLarge
from reef.inference.chat.choice import Choice, Delta
from reef.inference.chat.messages import Conversation
from reef.inference.chat.service import ChatRequest
from reef.runtime.interfaces import Grammar, SamplingParams

Body = TypeVar("Body")

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
"""Of both APIs, by status; for the others each has names of its own."""


@dataclass(slots=True, kw_only=True)
class ChatCall:
    """A validated inference request, whatever API it came through: a conversation, or bare prompts."""

    conversation: Conversation | None = None
    prompts: Sequence[str | Sequence[int]] = ()
    sampling: SamplingParams
    max_tokens: int | None  # None: what the context leaves
    fields: Mapping[str, str] = field(default_factory=dict)  # what this API calls "max_tokens", "messages", ...
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    call_prefix: str = "call_"  # of the ids of tool calls
    functions: bool = False  # a call is shown as the deprecated `function_call`
    echo: bool = False  # the answer begins with its prompt
    recorded: bool = True  # False: the answer names no receipt, for there is none

    def request(self, request_id: str, record_id: str, lane: str) -> ChatRequest:
        """What to ask the engine. The same `record_id` makes the same tool call ids."""
        digest = blake2b(record_id.encode(), digest_size=10).hexdigest()
        return ChatRequest(
            request_id=request_id,
            conversation=self.conversation,
            prompts=self.prompts,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            n=self.n,
            lane=lane,
            logprobs=self.logprobs,
            call_ids=f"{self.call_prefix}{digest}",
        )

    def field_of(self, error: InvalidRequest) -> str | None:
        """The field that `error` complains about, as this API calls it. Engines name fields of `sampling`."""
        name = None if error.field is None else error.field.removeprefix("sampling.")
        return None if name is None else self.fields.get(name, name)


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
    def whole(self, choices: Sequence[Choice], deltas: Sequence[list[Delta]]) -> bytes:
        """The body of an answer that is not streamed; `deltas` holds those of each choice."""

    @abstractmethod
    def opening(self, choices: Sequence[Choice]) -> bytes: ...

    @abstractmethod
    def delta(self, delta: Delta) -> bytes:
        """What a delta adds, without its ending. May be empty."""

    @abstractmethod
    def ended(self, delta: Delta, choice: Choice) -> bytes:
        """The end of one choice while others go on."""

    @abstractmethod
    def closing(self, delta: Delta, choices: Sequence[Choice]) -> bytes:
        """The end of the last choice, with the receipt, and all that follows it."""

    @abstractmethod
    def failure(self, error: ReefError) -> bytes:
        """The event that ends a stream in an error."""


@dataclass(slots=True, frozen=True)
class Api:
    """One provider-shaped route."""

    route: str
    parse: Callable[[bytes], ChatCall]
    writer: type[Writer]


MAX_TOOLS = 1024
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
"""Names that every template and format can write."""


def check_nesting(body: bytes, limit: int) -> None:
    """Raises RequestTooLarge naming the field if JSON is nested deeper than `limit`; no JSON is left to the parser."""
    if body.count(b"{") + body.count(b"[") <= limit:
        return
    try:
        document = msgspec.json.decode(body)
    except RecursionError:
        raise RequestTooLarge(f"must be nested at most {limit} deep") from None
    except (msgspec.MsgspecError, ValueError, OverflowError):
        return
    level = [document]
    for _ in range(limit + 1):
        level = [outer for outer in level if isinstance(outer, dict | list)]
        if not level:
            return
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    raise RequestTooLarge(f"must be nested at most {limit} deep", _deep_field(document, limit))


def check_lists(body: bytes, limit: int) -> None:
    """Raises RequestTooLarge if a body that is not read otherwise has over `limit` messages, items or prompts."""
    if body.count(b",") < limit:
        return
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # left to the parser
        return
    for name in ("messages", "input", "prompt") if isinstance(document, dict) else ():
        items = document.get(name)
        number = 0 if not isinstance(items, list) else sum(not isinstance(item, int) for item in items)  # ids are one
        if number > limit:
            raise RequestTooLarge(f"at most {limit} messages, got {number}", name)


def _deep_field(document: Any, limit: int) -> str | None:
    """Where the nesting that goes too deep begins: the first steps of its path."""
    level: list[tuple[str, Any]] = [("", document)]
    for _ in range(limit):
        level = [(_step(path, key), inner) for path, outer in level for key, inner in _children(outer)]
    deep = next((path for path, value in level if isinstance(value, dict | list)), "")
    return deep.removeprefix(".") or None


def _children(value: Any) -> Iterable[tuple[str | int, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()


def _step(path: str, key: str | int) -> str:
    if len(_STEP.findall(path)) >= 5:
        return path
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key[:64]}"


_STEP = re.compile(r"[.\[]")


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    """The grammar of a JSON schema."""
    return Grammar("json_schema", json.dumps(schema))


def check_choice(conversation: Conversation) -> None:
    """Raises InvalidRequest for a tool choice without such a tool, and for two tools of one name."""
    names = [tool.name for tool in conversation.tools]
    if conversation.tool_choice == "required":
        if not names:
            raise InvalidRequest("must be none or auto without tools", "tool_choice")
        if conversation.tool_name not in (None, *names):
            raise InvalidRequest(f"there is no tool {conversation.tool_name!r}", "tool_choice")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"two tools have the name {twice!r}", "tools")


_LONG_NUMBER = re.compile(rb"\d{19}")


def decode_body(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Decode and validate a JSON body. Raises InvalidRequest with the path of the offending field."""
    try:
        found = decoder.decode(body)
        if _LONG_NUMBER.search(body):
            msgspec.msgpack.encode(msgspec.json.decode(body))
        return found
    except OverflowError:
        raise InvalidRequest("the body has a whole number that does not fit in 64 bits") from None
    except RecursionError as error:
        raise InvalidRequest("the JSON is nested too deeply") from error
    except msgspec.ValidationError as error:
        message, field = locate(str(error))
        raise InvalidRequest(message, field) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def converted(value: dict[str, Any], kind: type[Body], name: str) -> Body:
    """`value`, validated. Raises InvalidRequest with the path of the offending field, which begins with `name`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, inner = locate(str(error))
        raise InvalidRequest(message, name if inner is None else f"{name}.{inner}") from error


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
