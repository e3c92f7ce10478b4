"""What OpenAI's APIs share (platform.openai.com/docs/api-reference): sampling fields, functions, usage, errors.

Fields that do not change an answer are accepted and ignored. What cannot be honoured is refused by name unless it says
nothing (null, an empty list, or the value that means "off").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from reef.errors import InvalidRequest, ReefError, http_status
from reef.inference.chat.choice import Choice, TokenLogprob
from reef.inference.chat.messages import Tool
from reef.runtime.interfaces import SamplingParams
from reef.service.wire.base import ERROR_TYPES, ChatCall, ToolName

Item = TypeVar("Item")

MAX_CHOICES = 128
MAX_STOPS = 16

ENCODER = msgspec.json.Encoder()

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
ModelName = Annotated[str, Meta(min_length=1)]


class SamplingBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling fields that chat and legacy completions have in common; null means absent."""

    temperature: Temperature | None = None
    top_p: Probability | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    # extensions that engines for open models share
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None

    def sampling(self, top_logprobs: int) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=top_p(self.top_p),
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            ignore_eos=bool(self.ignore_eos),
            seed=self.seed,
            top_logprobs=top_logprobs,
        )


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class FunctionBody(Struct, forbid_unknown_fields=True):
    """A function that may be called."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        given = {} if self.parameters is None else {"parameters": self.parameters}
        return Tool(name=self.name, description=self.description or "", **given)


def top_p(value: float | None) -> float:
    """0 means: only the likeliest token."""
    return 1.0 if value is None else max(value, 1e-6)


def refuse(body: Struct, allowed: Mapping[str, tuple[Any, ...]], within: str = "") -> None:
    """Raises InvalidRequest naming the first field that says more than it may."""
    for field, silent in allowed.items():
        value = getattr(body, field)
        if value is not None and value not in silent:
            raise InvalidRequest(f"{field} cannot be honoured by this deployment", within + field)


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


class Receipt(Struct):
    agent_record_id: str


def receipt(call: ChatCall, record_id: str) -> Receipt | UnsetType:
    return Receipt(record_id) if call.recorded else UNSET


class CachedDetail(Struct):
    cached_tokens: int


class OutputDetail(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetail
    completion_tokens_details: OutputDetail


def usage(choices: Sequence[Choice]) -> Usage:
    prompts = {id(choice.generation.prompt_ids): len(choice.generation.prompt_ids) for choice in choices}
    prompt = sum(prompts.values())
    output = sum(len(choice.generation.output_ids) for choice in choices)
    cached = choices[0].generation.cached_tokens
    reasoning = sum(choice.reasoning_tokens for choice in choices)
    return Usage(prompt, output, prompt + output, CachedDetail(cached), OutputDetail(reasoning))


def shown(token: TokenLogprob) -> ShownToken:
    top = [Alternative(readable(data), finite(logprob), list(data)) for data, logprob in token.top]
    return ShownToken(readable(token.token), finite(token.logprob), list(token.token), top)


def readable(data: bytes) -> str:
    return data.decode(errors="replace")


def finite(logprob: float) -> float:
    """JSON has no infinity; -9999.0 is what this API uses for it."""
    return max(logprob, -9999.0)


def event(data: Any) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + ENCODER.encode(data) + b"\n\n"


def named_event(name: str, **fields: Any) -> bytes:
    """A server-sent event whose data has its name as `type`."""
    return b"event: " + name.encode() + b"\ndata: " + ENCODER.encode({"type": name, **fields}) + b"\n\n"


# ---------------------------------------------------------------------------------------------- lists


class PageQuery(Struct, forbid_unknown_fields=True):
    """Which part of a list is wanted: what comes after the item with this id."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "asc"


def page_of(items: Sequence[tuple[str, Item | None]], query: PageQuery) -> tuple[list[Item], bool]:
    """The page, and whether more follows. `items` are in order, by their ids; None has a place and is not shown.

    Raises InvalidRequest if nothing has the id to go on after.
    """
    ordered = items if query.order == "asc" else items[::-1]
    first = 0
    if query.after is not None:
        first = next((place for place, (name, _) in enumerate(ordered, 1) if name == query.after), 0)
        if first == 0:
            raise InvalidRequest(f"there is no {query.after[:140]!r} in this list", "after")
    shown = [item for _, item in ordered[first:] if item is not None]
    return shown[: query.limit], len(shown) > query.limit


def list_body(data: Sequence[dict[str, Any]], more: bool) -> bytes:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return ENCODER.encode({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more})


# ---------------------------------------------------------------------------------------------- errors and models


def explained(error: ReefError) -> tuple[str, str | None]:
    """What to say of an error, and the field that it is about, which is part of it."""
    field = error.field if isinstance(error, InvalidRequest) else None
    return (str(error) if field is None or field in str(error) else f"{field}: {error}"), field


def error_body(error: ReefError, status: int | None = None) -> bytes:
    """The JSON of an error in this API's shape."""
    return ENCODER.encode({"error": error_detail(error, status)})


def error_detail(error: ReefError, status: int | None = None) -> dict[str, Any]:
    status = status or http_status(error)
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message, param = explained(error)
    return {"message": message, "type": kind, "param": param, "code": error_code(error)}


def error_code(error: ReefError) -> str:
    """`UnknownReceipt` is "unknown_receipt"."""
    name = type(error).__name__
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def model_body(model: str, created: int) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": created, "owned_by": "reef"}


def models_body(models: Sequence[str], created: int) -> bytes:
    return ENCODER.encode({"object": "list", "data": [model_body(model, created) for model in models]})
