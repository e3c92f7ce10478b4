"""OpenAI Responses (platform.openai.com/docs/api-reference/responses): requests and stored answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from reef.errors import InvalidRequest
from reef.inference.chat.messages import Conversation, Message, Tool, ToolCall
from reef.runtime.interfaces import Grammar, SamplingParams
from reef.service.wire.base import (
    MAX_TOOLS,
    ChatCall,
    ToolName,
    check_choice,
    converted,
    decode_body,
    schema_grammar,
)
from reef.service.wire.openai import Count, ModelName, Probability, Temperature, refuse, top_p

ID_PREFIX = "resp_"

Items = list[dict[str, Any]]


class TextPart(Struct, forbid_unknown_fields=True):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class MessageItem(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Struct, forbid_unknown_fields=True):
    call_id: str
    name: str
    arguments: str
    type: str = "function_call"
    id: str | None = None
    status: str | None = None
    namespace: None = None
    caller: Any = None
    async_: bool | None = msgspec.field(default=None, name="async")
    dumped: bool | None = msgspec.field(default=None, name="async_")  # as the client library's `model_dump` has it


class OutputItem(Struct, forbid_unknown_fields=True):
    call_id: str
    output: str | list[dict[str, Any]]
    type: str = "function_call_output"
    id: str | None = None
    name: str | None = None
    status: str | None = None
    namespace: None = None
    caller: Any = None


class ReasoningItem(Struct, forbid_unknown_fields=True):
    type: str = "reasoning"
    id: str | None = None
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class FunctionTool(Struct, forbid_unknown_fields=True):
    name: ToolName
    type: str = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Any = None
    allowed_callers: Any = None
    defer_loading: Literal[False] | None = None
    async_: bool | None = msgspec.field(default=None, name="async")


class Choose(Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class Format(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class Text(Struct, forbid_unknown_fields=True):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Struct, forbid_unknown_fields=True):
    effort: Annotated[str, Meta(min_length=1, max_length=32)] | None = None
    summary: str | None = None  # the reasoning itself is shown, so that no summary is needed
    generate_summary: str | None = None
    context: str | None = None
    mode: Literal["standard"] | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class PromptBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the prompt comes from; null means absent everywhere."""

    model: ModelName | None = None
    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choose | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    conversation: Any = None  # from here on refused unless they say nothing
    truncation: Any = None


class InputTokensBody(PromptBody, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to count its tokens."""

    personality: Any = None


class ResponsesBody(PromptBody, kw_only=True, forbid_unknown_fields=True):
    """The request body."""

    model: ModelName
    input: str | Items
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None  # from here on without effect on the answer
    user: str | None = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    access_programs: Any = None
    background: Any = None  # from here on refused unless they say nothing
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None


_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    "truncation": ("disabled",),
}
_COUNT_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {"conversation": (), "personality": (), "truncation": ("disabled",)}
_DECODER = msgspec.json.Decoder(ResponsesBody)
_COUNT_DECODER = msgspec.json.Decoder(InputTokensBody)
_LOGPROBS = "message.output_text.logprobs"
_FIELDS = {"max_tokens": "max_output_tokens", "messages": "input", "reasoning_effort": "reasoning.effort"}


@dataclass(slots=True, kw_only=True)
class ResponsesCall(ChatCall):
    """A call that may go on from an earlier answer: `goes_on_from` is its receipt."""

    instructions: str | None = None
    items: list[dict[str, Any]] = field(default_factory=list)
    goes_on_from: str | None = None
    echoed: dict[str, Any] = field(default_factory=dict)  # what the answer repeats of the request

    @property
    def refers(self) -> bool:
        """Whether it is not whole without what was stored."""
        return self.goes_on_from is not None or any(map(referred, self.items))

    def after(self, items: Sequence[dict[str, Any]], receipts: Sequence[str] = ()) -> ResponsesCall:
        """The same call, after these earlier items of these answers. Raises InvalidRequest naming a bad item."""
        assert self.conversation is not None
        told = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        messages = [*told, *messages_of([*items, *self.items], len(items))]
        if not messages:
            raise InvalidRequest("must have at least 1 item", "input")
        conversation = replace(self.conversation, messages=messages, receipts=frozenset(receipts))
        return replace(self, conversation=conversation)


def decode_responses(body: bytes) -> ResponsesBody:
    """Raises InvalidRequest naming the field."""
    return decode_body(_DECODER, body)


def parse_responses(body: bytes) -> ResponsesCall:
    """Raises InvalidRequest naming the field."""
    given = decode_responses(body)
    refuse(given, _SAYS_NOTHING)
    logprobs = _LOGPROBS in (given.include or ())
    call = ResponsesCall(
        conversation=_conversation(given),
        sampling=SamplingParams(
            temperature=1.0 if given.temperature is None else given.temperature,
            top_p=top_p(given.top_p),
            top_logprobs=given.top_logprobs or 0 if logprobs else 0,
        ),
        max_tokens=given.max_output_tokens,
        fields={**_FIELDS, "grammar": "text.format" if given.text and given.text.format else "tools"},
        stream=bool(given.stream),
        logprobs=logprobs,
        instructions=given.instructions,
        items=input_items(given),
        goes_on_from=receipt_of(given.previous_response_id),
        echoed=_echoed(given),
    )
    return call if call.refers else call.after([])


def parse_count(body: bytes) -> ResponsesCall:
    """The body of `input_tokens`. Raises InvalidRequest naming the field."""
    given = decode_body(_COUNT_DECODER, body)
    refuse(given, _COUNT_SAYS_NOTHING)
    call = ResponsesCall(
        conversation=_conversation(given),
        sampling=SamplingParams(),
        max_tokens=None,
        fields=_FIELDS,
        instructions=given.instructions,
        items=input_items(given),
        goes_on_from=receipt_of(given.previous_response_id),
    )
    return call if call.refers else call.after([])


def referred(item: Mapping[str, Any]) -> str | None:
    """The id of the stored item that this one stands for, if it does."""
    known = item.keys() <= {"id", "type"} and item.get("type") in (None, "item_reference")
    return item["id"] if known and isinstance(item.get("id"), str) else None


def receipt_of(response_id: str | None) -> str | None:
    """Raises InvalidRequest for what is no id of a response."""
    if response_id is None:
        return None
    if not response_id.startswith(ID_PREFIX):
        raise InvalidRequest(f"there is no response {response_id!r}", "previous_response_id")
    return response_id.removeprefix(ID_PREFIX)


def input_items(given: PromptBody) -> list[dict[str, Any]]:
    if isinstance(given.input, str):
        return [{"role": "user", "content": given.input}]
    return given.input or []


def _conversation(given: PromptBody) -> Conversation:
    """Everything but the messages."""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given.tools or ())]
    conversation = Conversation(
        messages=(),
        tools=tools,
        parallel_calls=given.parallel_tool_calls is not False,
        grammar=_grammar(given.text.format if given.text else None),
        effort=given.reasoning.effort if given.reasoning else None,
    )
    conversation = _chosen(conversation, given.tool_choice)
    check_choice(conversation)
    return conversation


def _tool(body: dict[str, Any], where: str) -> Tool:
    if body.get("type") != "function":
        raise InvalidRequest(f"a tool of type {body.get('type')!r} cannot be honoured", f"{where}.type")
    tool = converted(body, FunctionTool, where)
    given = {} if tool.parameters is None else {"parameters": tool.parameters}
    return Tool(name=tool.name, description=tool.description or "", **given)


def _chosen(conversation: Conversation, choose: str | Choose | None) -> Conversation:
    if choose is None or isinstance(choose, str):
        return replace(conversation, tool_choice=choose or "auto")
    if choose.type == "function" and choose.name is not None:
        return replace(conversation, tool_choice="required", tool_name=choose.name)
    if choose.type == "allowed_tools" and choose.mode is not None:
        names = {tool.get("name") for tool in choose.tools or ()}
        known = [tool for tool in conversation.tools if tool.name in names]
        if len(known) < len(names):
            raise InvalidRequest("one of the tools does not exist", "tool_choice.tools")
        return replace(conversation, tools=known, tool_choice=choose.mode)
    raise InvalidRequest(f"a choice of type {choose.type!r} cannot be honoured", "tool_choice")


def _grammar(form: Format | None) -> Grammar | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar("json_object", "")
    if form.schema is None:
        raise InvalidRequest("a format of type json_schema needs it", "text.format.schema")
    return schema_grammar(form.schema)


def _echoed(given: ResponsesBody) -> dict[str, Any]:
    """Fields of the response that repeat the request."""
    form = given.text.format if given.text else None
    reasoning = given.reasoning or Reasoning()
    return {
        "instructions": given.instructions,
        "max_output_tokens": given.max_output_tokens,
        "metadata": given.metadata or {},
        "parallel_tool_calls": given.parallel_tool_calls is not False,
        "previous_response_id": given.previous_response_id,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "service_tier": "default",
        "store": given.store is not False,
        "temperature": 1.0 if given.temperature is None else given.temperature,
        "text": {"format": _without_nulls(form) if form else {"type": "text"}},
        "tool_choice": given.tool_choice
        if isinstance(given.tool_choice, str)
        else _without_nulls(given.tool_choice)
        if given.tool_choice
        else "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in given.tools or ()],
        "top_logprobs": given.top_logprobs or 0,
        "top_p": 1.0 if given.top_p is None else given.top_p,
        "truncation": "disabled",
        "user": given.user,
    }


def _without_nulls(value: Struct) -> dict[str, Any]:
    return {name: inner for name, inner in msgspec.to_builtins(value).items() if inner is not None}


# ---------------------------------------------------------------------------------------------- items


def messages_of(items: Sequence[dict[str, Any]], first: int = 0) -> list[Message]:
    """Neighbouring items of the assistant are one turn. `first` is the number of the first item that `input` has."""
    messages: list[Message] = []
    for index, item in enumerate(items):
        message = _message(item, f"input[{index - first}]")
        if messages and messages[-1].role == message.role == "assistant":
            messages[-1] = _one_turn(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _one_turn(before: Message, after: Message) -> Message:
    return replace(
        before,
        content=before.content + after.content,
        reasoning="\n".join(filter(None, (before.reasoning, after.reasoning))),
        tool_calls=(*before.tool_calls, *after.tool_calls),
    )


def _message(item: Mapping[str, Any], where: str) -> Message:
    kind, body = item.get("type", "message"), dict(item)
    if kind == "message":
        turn = converted(body, MessageItem, where)
        role = "system" if turn.role == "developer" else turn.role
        return Message(role=role, content=_text(turn.content, f"{where}.content"))
    if kind == "function_call":
        call = converted(body, CallItem, where)
        return Message(role="assistant", content="", tool_calls=(ToolCall(call.call_id, call.name, call.arguments),))
    if kind == "function_call_output":
        output = converted(body, OutputItem, where)
        return Message(role="tool", content=_text(output.output, f"{where}.output"), tool_call_id=output.call_id)
    if kind == "reasoning":
        thought = converted(body, ReasoningItem, where)
        text = _text(thought.content or thought.summary or [], f"{where}.content")
        return Message(role="assistant", content="", reasoning=text)
    raise InvalidRequest(f"an item of type {kind!r} cannot be honoured", f"{where}.type")


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type")
        if kind not in ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"):
            raise InvalidRequest(f"a content part of type {kind!r} cannot be honoured", f"{where}[{index}]")
        read = converted(part, TextPart, f"{where}[{index}]")
        texts.append(read.text or read.refusal or "")
    return "".join(texts)
