"""OpenAI chat completions (platform.openai.com/docs/api-reference/chat): pure translation both ways.

Fields that do not change an answer are accepted and ignored. What cannot be honoured yet is refused by name unless
it says nothing (null, an empty list, or the value that means "off").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from reef.errors import InvalidRequest, ReefError, http_status
from reef.inference.chat.messages import Message, ToolCall
from reef.inference.chat.service import Choice, Delta, TokenLogprob
from reef.runtime.interfaces import Ending, SamplingParams
from reef.service.wire.base import ChatCall, Writer, decode_body

MAX_CHOICES = 128
MAX_STOPS = 16

# ---------------------------------------------------------------------------------------------- requests


class Part(Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    cache_control: Any = None  # ignored: caching is the engine's own business


Content = str | list[Part]


class Function(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class Call(Struct, forbid_unknown_fields=True):
    id: str
    function: Function
    type: str = "function"
    index: int | None = None


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


class AssistantTurn(Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True):
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[Call] | None = None
    annotations: Any = None  # these three come back from clients that send our answer as they got it
    audio: Any = None
    function_call: Any = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class ChatBody(Struct, forbid_unknown_fields=True):
    """The request body; null means absent everywhere."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[
        list[SystemTurn | DeveloperTurn | UserTurn | AssistantTurn | ToolTurn], Meta(min_length=1, max_length=100_000)
    ]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # extensions that engines for open models share
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    # accepted, without effect on the answer
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    # refused unless they say nothing
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),  # without tools both mean "answer in text"
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}
_DECODER = msgspec.json.Decoder(ChatBody)


def parse_chat(body: bytes) -> ChatCall:
    """Raises InvalidRequest naming the field."""
    chat = decode_body(_DECODER, body)
    for field, silent in _SAYS_NOTHING.items():
        value = getattr(chat, field)
        if value is not None and value not in silent:
            raise InvalidRequest(f"{field} cannot be honoured by this deployment", field)
    if chat.top_logprobs and not chat.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    if chat.stream_options is not None and not chat.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    limit, limit_field = chat.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, limit_field = chat.max_tokens, "max_tokens"
    elif chat.max_tokens not in (None, limit):
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one", "max_tokens")
    return ChatCall(
        messages=[_message(turn, f"messages[{index}]") for index, turn in enumerate(chat.messages)],
        sampling=_sampling(chat),
        max_tokens=limit,
        max_tokens_field=limit_field,
        n=chat.n or 1,
        stream=bool(chat.stream),
        include_usage=bool(chat.stream_options and chat.stream_options.include_usage),
        logprobs=bool(chat.logprobs),
    )


def _sampling(chat: ChatBody) -> SamplingParams:
    stop = [chat.stop] if isinstance(chat.stop, str) else chat.stop or []
    return SamplingParams(
        temperature=1.0 if chat.temperature is None else chat.temperature,
        top_p=1.0 if chat.top_p is None else max(chat.top_p, 1e-6),  # 0 means: only the likeliest
        top_k=max(chat.top_k or 0, 0),
        min_p=chat.min_p or 0.0,
        presence_penalty=chat.presence_penalty or 0.0,
        frequency_penalty=chat.frequency_penalty or 0.0,
        repetition_penalty=1.0 if chat.repetition_penalty is None else chat.repetition_penalty,
        logit_bias=chat.logit_bias or {},
        stop=stop,
        ignore_eos=bool(chat.ignore_eos),
        seed=chat.seed,
        top_logprobs=chat.top_logprobs or 0,
    )


def _message(turn: Turn | AssistantTurn | ToolTurn, field: str) -> Message:
    if isinstance(turn, AssistantTurn):
        for name in ("audio", "function_call"):
            if getattr(turn, name) is not None:
                raise InvalidRequest(f"{name} cannot be honoured by this deployment", f"{field}.{name}")
        if turn.content is None and not turn.tool_calls and turn.refusal is None:
            raise InvalidRequest("an assistant turn needs content or tool_calls", f"{field}.content")
        content = turn.refusal if turn.content is None else turn.content
        return Message(
            role="assistant",
            content=_text(content or "", f"{field}.content"),
            tool_calls=tuple(_call(call, f"{field}.tool_calls") for call in turn.tool_calls or ()),
            name=turn.name,
        )
    text = _text(turn.content, f"{field}.content")
    if isinstance(turn, ToolTurn):
        return Message(role="tool", content=text, tool_call_id=turn.tool_call_id, name=turn.name)
    # Templates of open models know one role for instructions.
    return Message(role="user" if isinstance(turn, UserTurn) else "system", content=text, name=turn.name)


def _call(call: Call, field: str) -> ToolCall:
    if call.type != "function":
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


class Alternative(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ShownToken(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class Logprobs(Struct):
    content: list[ShownToken]
    refusal: None = None


class Answer(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class WholeChoice(Struct):
    index: int
    message: Answer
    logprobs: Logprobs | None
    finish_reason: str


class CachedDetail(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetail


class Receipt(Struct):
    agent_record_id: str


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[WholeChoice]
    usage: Usage
    reef: Receipt
    object: str = "chat.completion"


class Piece(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


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
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    reef: Receipt | msgspec.UnsetType = msgspec.UNSET
    object: str = "chat.completion.chunk"


_ENCODER = msgspec.json.Encoder()
_FINISH = {Ending.STOP: "stop", Ending.LENGTH: "length"}


class ChatWriter(Writer):
    """Chat completions. A chunk has `usage: null` exactly when the usage chunk was asked for."""

    def whole(self, choices: Sequence[Choice], logprobs: Sequence[list[Delta]]) -> bytes:
        written = [
            WholeChoice(
                index=choice.index,
                message=Answer(choice.text),
                logprobs=self._logprobs([token for delta in deltas for token in delta.tokens]),
                finish_reason=_FINISH[choice.generation.ending],
            )
            for choice, deltas in zip(choices, logprobs, strict=True)
        ]
        receipt = Receipt(self.record_id)
        return _ENCODER.encode(
            Completion(f"chatcmpl-{self.record_id}", self.created, self.model, written, _usage(choices), receipt)
        )

    def opening(self) -> bytes:
        first = Piece(role="assistant", content="")
        return b"".join(self._chunk([ChunkChoice(index, first)]) for index in range(self.call.n))

    def delta(self, delta: Delta) -> bytes:
        if not delta.text and not delta.tokens:
            return b""
        return self._chunk([ChunkChoice(delta.index, Piece(content=delta.text), self._logprobs(delta.tokens))])

    def ended(self, delta: Delta) -> bytes:
        return self._chunk([self._finish(delta)])

    def closing(self, delta: Delta, choices: Sequence[Choice]) -> bytes:
        last = self._chunk([self._finish(delta)], reef=Receipt(self.record_id))
        usage = self._chunk([], usage=_usage(choices)) if self.call.include_usage else b""
        return last + usage + b"data: [DONE]\n\n"

    def failure(self, error: ReefError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    def _finish(self, delta: Delta) -> ChunkChoice:
        assert delta.ending is not None
        return ChunkChoice(delta.index, Piece(), finish_reason=_FINISH[delta.ending])

    def _logprobs(self, tokens: list[TokenLogprob]) -> Logprobs | None:
        return Logprobs([_shown(token) for token in tokens]) if self.call.logprobs else None

    def _chunk(
        self,
        choices: list[ChunkChoice],
        usage: Usage | None = None,
        reef: Receipt | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        reported = usage if self.call.include_usage else msgspec.UNSET
        chunk = Chunk(f"chatcmpl-{self.record_id}", self.created, self.model, choices, reported, reef)
        return b"data: " + _ENCODER.encode(chunk) + b"\n\n"


def _usage(choices: Sequence[Choice]) -> Usage:
    prompt = len(choices[0].generation.prompt_ids)
    output = sum(len(choice.generation.output_ids) for choice in choices)
    cached = choices[0].generation.cached_tokens
    return Usage(prompt, output, prompt + output, CachedDetail(cached))


def _shown(token: TokenLogprob) -> ShownToken:
    top = [Alternative(_readable(data), _finite(logprob), list(data)) for data, logprob in token.top]
    return ShownToken(_readable(token.token), _finite(token.logprob), list(token.token), top)


def _readable(data: bytes) -> str:
    return data.decode(errors="replace")


def _finite(logprob: float) -> float:
    """JSON has no infinity; -9999.0 is what this API uses for it."""
    return max(logprob, -9999.0)


# ---------------------------------------------------------------------------------------------- errors

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error"}


def error_body(error: ReefError, status: int | None = None) -> bytes:
    """The JSON of an error in this API's shape."""
    status = status or http_status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = error.field if isinstance(error, InvalidRequest) else None
    message = str(error) if param is None or param in str(error) else f"{param}: {error}"
    detail = {"message": message, "type": kind, "param": param, "code": error_code(error)}
    return _ENCODER.encode({"error": detail})


def error_code(error: ReefError) -> str:
    """`UnknownReceipt` is "unknown_receipt"."""
    name = type(error).__name__
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def models_body(models: Sequence[str], created: int) -> bytes:
    listed = [{"id": model, "object": "model", "created": created, "owned_by": "reef"} for model in models]
    return _ENCODER.encode({"object": "list", "data": listed})
