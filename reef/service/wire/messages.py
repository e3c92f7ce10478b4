"""Anthropic Messages (docs.anthropic.com/en/api/messages): pure translation both ways."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from reef.errors import InvalidRequest, ReefError, RequestTooLarge, Unavailable, http_status
from reef.inference.chat.choice import Choice, Delta
from reef.inference.chat.messages import Conversation, Message, Tool, ToolCall, parsed_arguments
from reef.inference.chat.pieces import Kind, joined
from reef.runtime.interfaces import Ending, SamplingParams
from reef.service.wire.base import (
    ERROR_TYPES,
    MAX_TOOLS,
    Api,
    ChatCall,
    ToolName,
    Writer,
    check_choice,
    converted,
    decode_body,
    schema_grammar,
)
from reef.service.wire.openai import ENCODER, explained, named_event, refuse

# ---------------------------------------------------------------------------------------------- requests


class TextBlock(Struct, forbid_unknown_fields=True):
    text: str
    type: str = "text"
    cache_control: Any = None  # ignored: caching is the engine's own business
    citations: Any = None


class NoCitations(Struct, forbid_unknown_fields=True):
    enabled: Literal[False] = False


class TextSource(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    data: str
    media_type: str | None = None


class DocumentBlock(Struct, forbid_unknown_fields=True):
    source: TextSource
    title: str | None = None
    context: str | None = None
    type: str = "document"
    citations: NoCitations | None = None
    cache_control: Any = None


class SearchResultBlock(Struct, forbid_unknown_fields=True):
    source: str
    title: str
    content: list[TextBlock]
    type: str = "search_result"
    citations: NoCitations | None = None
    cache_control: Any = None


class ThinkingBlock(Struct, forbid_unknown_fields=True):
    thinking: str
    signature: str | None = None
    type: str = "thinking"


class RedactedBlock(Struct, forbid_unknown_fields=True):
    data: str
    type: str = "redacted_thinking"


class ToolUseBlock(Struct, forbid_unknown_fields=True):
    id: str
    name: str
    input: dict[str, Any] | str  # text where the model's arguments were no JSON object
    type: str = "tool_use"
    cache_control: Any = None
    caller: Any = None
    toolset_name: str | None = None


class ToolResultBlock(Struct, forbid_unknown_fields=True):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    type: str = "tool_result"
    cache_control: Any = None
    toolset_name: str | None = None


class ToolBody(Struct, forbid_unknown_fields=True):
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    input_examples: Any = None
    allowed_callers: Any = None
    defer_loading: Literal[False] | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: str | None = None


class Format(Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    effort: str | None = None
    format: Format | None = None


class Turn(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What shapes the prompt; null means absent everywhere."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    cache_control: Any = None  # these have no effect on the answer
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesBody(CountBody, kw_only=True, forbid_unknown_fields=True):
    """The whole request body."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=64)] | None = (
        None
    )
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    metadata: dict[str, Any] | None = None  # these have no effect on the answer
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    container: Any = None  # these are refused unless they say nothing
    mcp_servers: Any = None
    context_management: Any = None


_DECODER = msgspec.json.Decoder(MessagesBody)
_COUNT_DECODER = msgspec.json.Decoder(CountBody)
_CHANGES_NOTHING: tuple[Any, ...] = ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
_FIELDS = {"reasoning_effort": "output_config.effort", "stop": "stop_sequences"}


def parse_messages(body: bytes) -> ChatCall:
    """Raises InvalidRequest naming the field."""
    given = decode_body(_DECODER, body)
    refuse(given, {"container": (), "mcp_servers": ([],), "context_management": _CHANGES_NOTHING})
    sampling = SamplingParams(
        temperature=1.0 if given.temperature is None else given.temperature,
        top_p=1.0 if given.top_p is None else max(given.top_p, 1e-6),
        top_k=given.top_k or 0,
        stop=given.stop_sequences or [],
    )
    return ChatCall(
        conversation=_conversation(given),
        sampling=sampling,
        max_tokens=given.max_tokens,
        fields={**_FIELDS, "grammar": _form(given)[1]},
        stream=bool(given.stream),
        call_prefix="toolu_",
    )


def parse_count(body: bytes) -> Conversation:
    """The body of `count_tokens`. Raises InvalidRequest naming the field."""
    return _conversation(decode_body(_COUNT_DECODER, body))


def _conversation(given: CountBody) -> Conversation:
    messages = [] if given.system is None else [Message(role="system", content=_joined_text(given.system, "system"))]
    for index, turn in enumerate(given.messages):
        messages += _messages(turn, f"messages[{index}]")
    config, (form, _) = given.output_config or OutputConfig(), _form(given)
    choice = given.tool_choice or ToolChoice("auto")
    last = messages[-1]
    conversation = Conversation(
        messages=_merged(messages),
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(given.tools or ())],
        tool_choice="required" if choice.type in ("any", "tool") else choice.type,
        tool_name=choice.name if choice.type == "tool" else None,
        parallel_calls=not choice.disable_parallel_tool_use,
        grammar=None if form is None else schema_grammar(form.schema),
        effort=config.effort,
        thinking=_thinking(given.thinking),
        prefill=last.role == "assistant" and bool(last.content) and not last.tool_calls,
    )
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequest("a choice of type tool needs a name", "tool_choice.name")
    check_choice(conversation)
    return conversation


def _form(given: CountBody) -> tuple[Format | None, str]:
    """The form of the answer, and the field that a grammar comes from."""
    if given.output_config is not None and given.output_config.format is not None:
        return given.output_config.format, "output_config.format"
    return given.output_format, "output_format" if given.output_format is not None else "tools"


def _thinking(given: Thinking | None) -> bool | None:
    """This API thinks only when it is asked to."""
    if given is None or given.type == "disabled":
        return False
    return True if given.type == "enabled" else None


def _tool(body: dict[str, Any], field: str) -> Tool:
    kind = body.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequest(f"a tool of type {kind!r} cannot be honoured", f"{field}.type")
    tool = converted(body, ToolBody, field)
    return Tool(name=tool.name, description=tool.description or "", parameters=tool.input_schema)


def _messages(turn: Turn, field: str) -> list[Message]:
    if turn.role == "assistant":
        return [_assistant(turn.content, f"{field}.content")]
    if isinstance(turn.content, str) or turn.role == "system":
        return [Message(role=turn.role, content=_joined_text(turn.content, f"{field}.content"))]
    messages: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(turn.content):
        where = f"{field}.content[{index}]"
        if block.get("type") == "tool_result":
            result = converted(block, ToolResultBlock, where)
            content = _joined_text(result.content or "", f"{where}.content")
            messages.append(Message(role="tool", content=content, tool_call_id=result.tool_use_id))
        else:
            texts.append(_text(block, where))
    if texts or not messages:
        messages.append(Message(role="user", content="\n\n".join(texts)))
    return messages


def _assistant(content: str | list[dict[str, Any]], field: str) -> Message:
    if isinstance(content, str):
        return Message(role="assistant", content=content)
    texts, reasoning, calls = [], [], []
    for index, block in enumerate(content):
        where, kind = f"{field}[{index}]", block.get("type")
        if kind == "thinking":
            reasoning.append(converted(block, ThinkingBlock, where).thinking)
        elif kind == "redacted_thinking":
            converted(block, RedactedBlock, where)
        elif kind == "tool_use":
            use = converted(block, ToolUseBlock, where)
            arguments = use.input if isinstance(use.input, str) else json.dumps(use.input, ensure_ascii=False)
            calls.append(ToolCall(use.id, use.name, arguments))
        else:
            texts.append(_text(block, where))
    return Message(role="assistant", content="".join(texts), reasoning="\n".join(reasoning), tool_calls=tuple(calls))


def _joined_text(content: str | list[dict[str, Any]], field: str) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(_text(block, f"{field}[{index}]") for index, block in enumerate(content))


def _text(block: dict[str, Any], field: str) -> str:
    kind = block.get("type")
    if kind == "document":
        document = converted(block, DocumentBlock, field)
        return "\n\n".join(filter(None, (document.title, document.context, document.source.data)))
    if kind == "search_result":
        result = converted(block, SearchResultBlock, field)
        return "\n\n".join([result.title, result.source, *(part.text for part in result.content)])
    if kind != "text":
        raise InvalidRequest(f"a content block of type {kind!r} cannot be honoured", field)
    return converted(block, TextBlock, field).text


def _merged(messages: Sequence[Message]) -> list[Message]:
    """This API takes neighbouring turns of the user as one."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1].role == message.role == "user":
            found[-1] = replace(found[-1], content=f"{found[-1].content}\n\n{message.content}")
        else:
            found.append(message)
    return found


# ---------------------------------------------------------------------------------------------- answers


@dataclass(slots=True, frozen=True)
class _Kind:
    """How blocks of one kind are streamed."""

    delta: str
    key: str


_DELTAS: Mapping[Kind, _Kind] = {
    Kind.TEXT: _Kind("text_delta", "text"),
    Kind.REASONING: _Kind("thinking_delta", "thinking"),
    Kind.ARGUMENTS: _Kind("input_json_delta", "partial_json"),
}


class MessagesWriter(Writer):
    """One block is open at a time; every opened one is closed."""

    def __init__(self, call: ChatCall, record_id: str, created: int, model: str) -> None:
        super().__init__(call, record_id, created, model)
        self._block = -1
        self._open: Kind | None = None
        self._calls = 0
        self._call_id: Callable[[int], str] = str

    def whole(self, choices: Sequence[Choice], deltas: Sequence[list[Delta]]) -> bytes:
        choice = choices[0]
        content: list[dict[str, Any]] = []
        calls = iter(choice.answer.tool_calls)
        for piece in joined(piece for delta in deltas[0] for piece in delta.pieces):
            if piece.kind is Kind.TEXT:
                content.append({"type": "text", "text": piece.text, "citations": None})
            elif piece.kind is Kind.REASONING:
                content.append({"type": "thinking", "thinking": piece.text, "signature": self.record_id})
            elif piece.kind is Kind.CALL:
                content.append(_tool_use(next(calls)))
        message = self._message(choice, content, *_stop(choice, self.call.sampling.stop))
        return ENCODER.encode({**message, **self._receipt()})

    def opening(self, choices: Sequence[Choice]) -> bytes:
        self._call_id = choices[0].answer.call_id
        message = self._message(choices[0], [], None, None)
        message["usage"]["output_tokens"] = 0
        return named_event("message_start", message=message)

    def delta(self, delta: Delta) -> bytes:
        parts = []
        for piece in delta.pieces:
            if piece.kind is Kind.CALL:
                parts.append(self._begin(Kind.ARGUMENTS, self._empty_call(piece.text)))
                continue
            if piece.kind is not self._open:
                parts.append(self._begin(piece.kind, _empty(piece.kind)))
            kind = _DELTAS[piece.kind]
            parts.append(self._delta({"type": kind.delta, kind.key: piece.text}))
        return b"".join(parts)

    def ended(self, delta: Delta, choice: Choice) -> bytes:
        return b""  # there is one choice only

    def closing(self, delta: Delta, choices: Sequence[Choice]) -> bytes:
        choice = choices[0]
        reason, sequence = _stop(choice, self.call.sampling.stop)
        last = named_event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=_usage(choice),
            **self._receipt(),
        )
        return self._end() + last + named_event("message_stop")

    def failure(self, error: ReefError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _receipt(self) -> dict[str, Any]:
        return {"reef": {"agent_record_id": self.record_id}} if self.call.recorded else {}

    def _begin(self, kind: Kind, block: dict[str, Any]) -> bytes:
        end = self._end()
        self._open = kind
        self._block += 1
        return end + named_event("content_block_start", index=self._block, content_block=block)

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open is Kind.REASONING:
            signed = self._delta({"type": "signature_delta", "signature": self.record_id})
        self._open = None
        return signed + named_event("content_block_stop", index=self._block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", index=self._block, delta=delta)

    def _empty_call(self, name: str) -> dict[str, Any]:
        self._calls += 1
        return {"type": "tool_use", "id": self._call_id(self._calls - 1), "name": name, "input": {}}

    def _message(
        self, choice: Choice, content: list[dict[str, Any]], reason: str | None, sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self.record_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": _usage(choice),
        }


def _empty(kind: Kind) -> dict[str, Any]:
    if kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": "", "citations": None}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """Arguments that are no JSON object are shown as the text that they are."""
    value = parsed_arguments(call.arguments)
    return {
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": value if isinstance(value, dict) else call.arguments,
    }


def _stop(choice: Choice, sequences: list[str]) -> tuple[str, str | None]:
    if choice.generation.ending is Ending.LENGTH:
        return "max_tokens", None
    if choice.stopped_by in sequences:
        return "stop_sequence", choice.stopped_by
    return ("tool_use" if choice.answer.tool_calls else "end_turn"), None


def _usage(choice: Choice) -> dict[str, Any]:
    generation = choice.generation
    return {
        "input_tokens": len(generation.prompt_ids) - generation.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": generation.cached_tokens,
        "output_tokens": len(generation.output_ids),
    }


def count_body(tokens: int) -> bytes:
    return ENCODER.encode({"input_tokens": tokens})


def models_body(models: Sequence[str], created: str) -> bytes:
    """`created` is a time in RFC 3339."""
    return ENCODER.encode(
        {
            "data": [model_body(model, created) for model in models],
            "has_more": False,
            "first_id": models[0],
            "last_id": models[-1],
        }
    )


def model_body(model: str, created: str) -> dict[str, Any]:
    return {"type": "model", "id": model, "display_name": model, "created_at": created}


# ---------------------------------------------------------------------------------------------- errors


def error_body(error: ReefError, status: int | None = None) -> bytes:
    """The JSON of an error in this API's shape."""
    status = status or http_status(error)
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if isinstance(error, RequestTooLarge):
        kind = "request_too_large"
    elif isinstance(error, Unavailable):
        kind = "overloaded_error"
    message, _ = explained(error)
    return ENCODER.encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": None})


MESSAGES = Api("/v1/messages", parse_messages, MessagesWriter)
