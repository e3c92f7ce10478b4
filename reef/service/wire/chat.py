"""OpenAI chat completions (platform.openai.com/docs/api-reference/chat): pure translation both ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from reef.errors import InvalidRequest, ReefError
from reef.inference.chat.choice import Choice, Delta, TokenLogprob
from reef.inference.chat.messages import Conversation, Message, Tool, ToolCall
from reef.inference.chat.pieces import Kind
from reef.runtime.interfaces import Ending, Grammar
from reef.service.wire.base import MAX_TOOLS, Api, ChatCall, Writer, check_choice, decode_body, schema_grammar
from reef.service.wire.openai import (
    ENCODER,
    Count,
    FunctionBody,
    ModelName,
    Receipt,
    SamplingBody,
    ShownToken,
    StreamOptions,
    Usage,
    error_body,
    event,
    receipt,
    refuse,
    shown,
    usage,
)

ID_PREFIX = "chatcmpl-"

# ---------------------------------------------------------------------------------------------- requests


class Part(Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    cache_control: Any = None  # ignored, as is the next: caching is the engine's own business
    prompt_cache_breakpoint: Any = None


Content = str | list[Part]


class Function(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class Call(Struct, forbid_unknown_fields=True):
    id: str
    function: Function | None = None
    type: str = "function"
    index: int | None = None
    custom: Any = None


class Turn(Struct, tag_field="role", forbid_unknown_fields=True):
    content: Content
    name: str | None = None


class SystemTurn(Turn, tag="system"):
    pass


class DeveloperTurn(Turn, tag="developer"):
    pass


class UserTurn(Turn, tag="user"):
    pass


class ToolTurn(Struct, tag_field="role", tag="tool", forbid_unknown_fields=True):
    content: Content
    tool_call_id: str
    name: str | None = None


class FunctionTurn(Struct, tag_field="role", tag="function", forbid_unknown_fields=True):
    """The result of a `function_call`; deprecated."""

    content: Content | None
    name: str


class AssistantTurn(Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True):
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[Call] | None = None
    function_call: Function | None = None  # deprecated
    reasoning_content: str | None = None
    annotations: Any = None  # these two come back from clients that send our answer as they got it
    audio: Any = None


AnyTurn = SystemTurn | DeveloperTurn | UserTurn | AssistantTurn | ToolTurn | FunctionTurn


class ToolBody(Struct, forbid_unknown_fields=True):
    type: str
    function: FunctionBody | None = None
    custom: Any = None


class Named(Struct, forbid_unknown_fields=True):
    name: str


class AllowedTool(Struct, forbid_unknown_fields=True):
    type: str
    function: Named | None = None


class AllowedTools(Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class Choose(Struct, forbid_unknown_fields=True):
    type: str
    function: Named | None = None
    allowed_tools: AllowedTools | None = None
    custom: Any = None


class JsonSchema(Struct, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    """The request body; null means absent everywhere."""

    model: ModelName
    messages: Annotated[list[AnyTurn], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choose | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionBody], Meta(max_length=MAX_TOOLS)] | None = None  # deprecated, as is the next
    function_call: Literal["none", "auto"] | Named | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Annotated[str, Meta(min_length=1, max_length=32)] | None = None
    # accepted, without effect on the answer
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    prediction: Any = None
    # refused unless they say nothing
    modalities: Any = None
    moderation: Any = None
    audio: Any = None
    verbosity: Any = None
    web_search_options: Any = None


_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "moderation": (),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_DECODER = msgspec.json.Decoder(ChatBody)


def parse_chat(body: bytes) -> ChatCall:
    """Raises InvalidRequest naming the field."""
    chat = decode_body(_DECODER, body)
    refuse(chat, _SAYS_NOTHING)
    if chat.top_logprobs and not chat.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    if chat.stream_options is not None and not chat.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    limit, limit_field = chat.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, limit_field = chat.max_tokens, "max_tokens"
    elif chat.max_tokens not in (None, limit):
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one", "max_tokens")
    tools_field = "functions" if chat.functions else "tools"
    return ChatCall(
        conversation=_conversation(chat),
        sampling=chat.sampling(chat.top_logprobs or 0),
        max_tokens=limit,
        fields={"max_tokens": limit_field, "grammar": "response_format" if chat.response_format else tools_field},
        n=chat.n or 1,
        stream=bool(chat.stream),
        include_usage=bool(chat.stream_options and chat.stream_options.include_usage),
        logprobs=bool(chat.logprobs),
        functions=bool(chat.functions),
    )


def _conversation(chat: ChatBody) -> Conversation:
    messages = [_message(turn, f"messages[{index}]", index) for index, turn in enumerate(chat.messages)]
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(chat.tools or ())]
    last = messages[-1]
    conversation = Conversation(
        messages=messages,
        tools=tools,
        parallel_calls=chat.parallel_tool_calls is not False,
        grammar=_grammar(chat.response_format),
        effort=chat.reasoning_effort,
        prefill=last.role == "assistant" and bool(last.content) and not last.tool_calls,
    )
    if chat.functions or isinstance(chat.function_call, Named):
        return _with_functions(conversation, chat)
    conversation = _chosen(conversation, chat.tool_choice)
    check_choice(conversation)
    return conversation


def _with_functions(conversation: Conversation, chat: ChatBody) -> Conversation:
    """Functions are tools of which one at most is called."""
    if chat.tools or chat.tool_choice is not None:
        raise InvalidRequest("send tools and tool_choice instead of functions and function_call, not both", "functions")
    choose = chat.function_call
    named = choose.name if isinstance(choose, Named) else None
    conversation = replace(
        conversation,
        tools=[function.tool() for function in chat.functions or ()],
        tool_choice=choose if isinstance(choose, str) else "required" if named else "auto",
        tool_name=named,
        parallel_calls=False,
    )
    try:
        check_choice(conversation)
    except InvalidRequest as error:
        error.field = "functions" if error.field == "tools" else "function_call"
        raise
    return conversation


def _tool(body: ToolBody, field: str) -> Tool:
    if body.type != "function":
        raise InvalidRequest(f"a tool of type {body.type!r} cannot be honoured", f"{field}.type")
    if body.function is None:
        raise InvalidRequest("a tool of type function needs it", f"{field}.function")
    return body.function.tool()


def _chosen(conversation: Conversation, choose: str | Choose | None) -> Conversation:
    if choose is None or isinstance(choose, str):
        return replace(conversation, tool_choice=choose or "auto")
    if choose.type == "function" and choose.function is not None:
        return replace(conversation, tool_choice="required", tool_name=choose.function.name)
    if choose.type == "allowed_tools" and choose.allowed_tools is not None:
        names = {tool.function.name for tool in choose.allowed_tools.tools if tool.function is not None}
        if missing := names - {tool.name for tool in conversation.tools}:
            raise InvalidRequest(f"there is no tool {min(missing)!r}", "tool_choice.allowed_tools.tools")
        tools = [tool for tool in conversation.tools if tool.name in names]
        return replace(conversation, tools=tools, tool_choice=choose.allowed_tools.mode)
    raise InvalidRequest(f"a choice of type {choose.type!r} cannot be honoured", "tool_choice")


def _grammar(form: ResponseFormat | None) -> Grammar | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar("json_object", "")
    if form.json_schema is None:
        raise InvalidRequest("a format of type json_schema needs it", "response_format.json_schema")
    return schema_grammar(form.json_schema.schema or {})


def _message(turn: AnyTurn, field: str, index: int) -> Message:
    """`index` of the turn names the call of a function: such calls have no ids, and the next turn has the result."""
    if isinstance(turn, AssistantTurn):
        refuse(turn, {"audio": ()}, f"{field}.")
        if turn.content is None and not turn.tool_calls and turn.function_call is None and turn.refusal is None:
            raise InvalidRequest("an assistant turn needs content or tool_calls", f"{field}.content")
        if turn.tool_calls and turn.function_call is not None:
            raise InvalidRequest(
                "an assistant turn has tool_calls or function_call, not both", f"{field}.function_call"
            )
        content = turn.refusal if turn.content is None else turn.content
        calls = [_call(call, f"{field}.tool_calls") for call in turn.tool_calls or ()]
        if turn.function_call is not None:
            calls = [ToolCall(f"call_{index}", turn.function_call.name, turn.function_call.arguments)]
        return Message(
            role="assistant",
            content=_text(content or "", f"{field}.content"),
            reasoning=turn.reasoning_content or "",
            tool_calls=tuple(calls),
            name=turn.name,
        )
    if isinstance(turn, FunctionTurn):
        text = _text(turn.content or "", f"{field}.content")
        return Message(role="tool", content=text, tool_call_id=f"call_{index - 1}", name=turn.name)
    text = _text(turn.content, f"{field}.content")
    if isinstance(turn, ToolTurn):
        return Message(role="tool", content=text, tool_call_id=turn.tool_call_id, name=turn.name)
    # Templates of open models know one role for instructions.
    return Message(role="user" if isinstance(turn, UserTurn) else "system", content=text, name=turn.name)


def _call(call: Call, field: str) -> ToolCall:
    if call.type != "function" or call.function is None:
        raise InvalidRequest(f"tool calls of type {call.type!r} cannot be honoured", field)
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _text(content: Content, field: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None:
            raise InvalidRequest(f"a content part of type {part.type!r} cannot be honoured", f"{field}[{index}]")
        texts.append(text)
    return "".join(texts)


# ---------------------------------------------------------------------------------------------- answers


class Logprobs(Struct):
    content: list[ShownToken]
    refusal: None = None


class WholeCall(Struct):
    id: str
    function: Function
    type: str = "function"


class Answer(Struct, omit_defaults=True):
    role: str
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[WholeCall] | None = None
    function_call: Function | None = None


class WholeChoice(Struct):
    index: int
    message: Answer
    logprobs: Logprobs | None
    finish_reason: str


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[WholeChoice]
    usage: Usage
    reef: Receipt | UnsetType
    object: str = "chat.completion"


class FunctionPiece(Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class CallPiece(Struct, omit_defaults=True):
    index: int
    function: FunctionPiece
    id: str | None = None
    type: str | None = None


class Piece(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPiece] | None = None
    function_call: FunctionPiece | None = None


class ChunkChoice(Struct):
    index: int
    delta: Piece
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Chunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    reef: Receipt | UnsetType = UNSET
    object: str = "chat.completion.chunk"


class ChatWriter(Writer):
    """Chat completions. A chunk has `usage: null` exactly when the usage chunk was asked for."""

    def __init__(self, call: ChatCall, record_id: str, created: int, model: str) -> None:
        super().__init__(call, record_id, created, model)
        self._calls = [0] * call.n  # begun so far, of each choice
        self._choices: Sequence[Choice] = ()

    def whole(self, choices: Sequence[Choice], deltas: Sequence[list[Delta]]) -> bytes:
        written = [
            WholeChoice(
                index=choice.index,
                message=self._answer(choice),
                logprobs=self._logprobs([token for delta in own for token in delta.tokens]),
                finish_reason=self._finish_reason(choice),
            )
            for choice, own in zip(choices, deltas, strict=True)
        ]
        named = receipt(self.call, self.record_id)
        return ENCODER.encode(
            Completion(f"{ID_PREFIX}{self.record_id}", self.created, self.model, written, usage(choices), named)
        )

    def opening(self, choices: Sequence[Choice]) -> bytes:
        self._choices = choices
        first = Piece(role="assistant", content="")
        return b"".join(self._chunk([ChunkChoice(choice.index, first)]) for choice in choices)

    def delta(self, delta: Delta) -> bytes:
        pieces = [self._piece(delta.index, piece.kind, piece.text) for piece in delta.pieces]
        if delta.tokens and not pieces:
            pieces = [Piece(content="")]
        parts = []
        for number, piece in enumerate(pieces):
            logprobs = self._logprobs(delta.tokens if number == 0 else [])
            parts.append(self._chunk([ChunkChoice(delta.index, piece, logprobs)]))
        return b"".join(parts)

    def ended(self, delta: Delta, choice: Choice) -> bytes:
        return self._chunk([ChunkChoice(delta.index, Piece(), finish_reason=self._finish_reason(choice))])

    def closing(self, delta: Delta, choices: Sequence[Choice]) -> bytes:
        last = ChunkChoice(delta.index, Piece(), finish_reason=self._finish_reason(choices[delta.index]))
        used = self._chunk([], used=usage(choices)) if self.call.include_usage else b""
        return self._chunk([last], reef=receipt(self.call, self.record_id)) + used + b"data: [DONE]\n\n"

    def failure(self, error: ReefError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    def _piece(self, index: int, kind: Kind, text: str) -> Piece:
        if kind is Kind.TEXT:
            return Piece(content=text)
        if kind is Kind.REASONING:
            return Piece(reasoning_content=text)
        if kind is Kind.CALL:
            number = self._calls[index]
            self._calls[index] += 1
            if self.call.functions:
                return Piece(function_call=FunctionPiece("", text))
            call_id = self._choices[index].answer.call_id(number)
            return Piece(tool_calls=[CallPiece(number, FunctionPiece("", text), call_id, "function")])
        if self.call.functions:
            return Piece(function_call=FunctionPiece(text))
        return Piece(tool_calls=[CallPiece(self._calls[index] - 1, FunctionPiece(text))])

    def _answer(self, choice: Choice) -> Answer:
        answer = choice.answer
        calls = [WholeCall(call.id, Function(call.name, call.arguments)) for call in answer.tool_calls]
        found = Answer("assistant", answer.text or (None if calls else ""), None, answer.reasoning or None)
        if calls and self.call.functions:
            found.function_call = calls[0].function
        elif calls:
            found.tool_calls = calls
        return found

    def _finish_reason(self, choice: Choice) -> str:
        if choice.generation.ending is Ending.LENGTH:
            return "length"
        if not choice.answer.tool_calls:
            return "stop"
        return "function_call" if self.call.functions else "tool_calls"

    def _logprobs(self, tokens: list[TokenLogprob]) -> Logprobs | None:
        return Logprobs([shown(token) for token in tokens]) if self.call.logprobs else None

    def _chunk(self, choices: list[ChunkChoice], used: Usage | None = None, reef: Receipt | UnsetType = UNSET) -> bytes:
        reported = used if self.call.include_usage else UNSET
        return event(Chunk(f"{ID_PREFIX}{self.record_id}", self.created, self.model, choices, reported, reef))


CHAT = Api("/v1/chat/completions", parse_chat, ChatWriter)
