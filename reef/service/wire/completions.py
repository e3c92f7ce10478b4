"""OpenAI's legacy completions (platform.openai.com/docs/api-reference/completions): bare prompts, no template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from reef.errors import InvalidRequest, ReefError
from reef.inference.chat.choice import Choice, Delta, TokenLogprob
from reef.runtime.interfaces import Ending
from reef.service.wire.base import Api, ChatCall, Writer, decode_body
from reef.service.wire.openai import (
    ENCODER,
    MAX_CHOICES,
    Count,
    ModelName,
    Receipt,
    SamplingBody,
    StreamOptions,
    Usage,
    error_body,
    event,
    finite,
    readable,
    receipt,
    refuse,
    usage,
)

DEFAULT_MAX_TOKENS = 16  # as this API documents it

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Ids = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionBody(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    """The request body; null means absent everywhere."""

    model: ModelName
    prompt: str | Annotated[list[str | TokenId | Ids], Meta(min_length=1)]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # without effect on the answer
    best_of: Any = None  # these two are refused unless they say nothing
    suffix: Any = None


_DECODER = msgspec.json.Decoder(CompletionBody)


def parse_completion(body: bytes) -> ChatCall:
    """Raises InvalidRequest naming the field."""
    given = decode_body(_DECODER, body)
    refuse(given, {"suffix": ("",), "best_of": (given.n or 1,)})
    if given.stream_options is not None and not given.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    prompts = _prompts(given.prompt)
    if given.echo and (given.logprobs is not None or not all(isinstance(prompt, str) for prompt in prompts)):
        raise InvalidRequest("echo cannot be honoured with logprobs, nor with prompts of token ids", "echo")
    number = given.n or 1
    if len(prompts) * number > MAX_CHOICES:
        raise InvalidRequest(f"at most {MAX_CHOICES} choices of all prompts, got {len(prompts) * number}", "n")
    return ChatCall(
        prompts=prompts,
        sampling=given.sampling(given.logprobs or 0),
        max_tokens=given.max_tokens or DEFAULT_MAX_TOKENS,
        n=number,
        stream=bool(given.stream),
        include_usage=bool(given.stream_options and given.stream_options.include_usage),
        logprobs=given.logprobs is not None,
        echo=bool(given.echo),
    )


def _prompts(given: str | list[str | int | list[int]]) -> list[str | Sequence[int]]:
    if isinstance(given, str):
        return [given]
    texts: list[str | Sequence[int]] = [item for item in given if isinstance(item, str)]
    ids = [item for item in given if isinstance(item, int)]
    lists: list[str | Sequence[int]] = [item for item in given if isinstance(item, list)]
    if len(given) not in (len(texts), len(ids), len(lists)):
        raise InvalidRequest("must be all texts, all token ids, or all lists of token ids", "prompt")
    return texts or lists or [ids]


class Logprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Struct):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    reef: Receipt | UnsetType = UNSET
    object: str = "text_completion"


_FINISH = {Ending.STOP: "stop", Ending.LENGTH: "length"}


class CompletionWriter(Writer):
    """A chunk has `usage: null` exactly when the usage chunk was asked for."""

    def __init__(self, call: ChatCall, record_id: str, created: int, model: str) -> None:
        super().__init__(call, record_id, created, model)
        self._offsets: dict[int, int] = {}  # where the next token of each choice begins

    def whole(self, choices: Sequence[Choice], deltas: Sequence[list[Delta]]) -> bytes:
        written = [
            TextChoice(
                choice.index,
                self._echo(choice.index) + choice.text,
                self._logprobs(choice.index, [token for delta in own for token in delta.tokens]),
                _FINISH[choice.generation.ending],
            )
            for choice, own in zip(choices, deltas, strict=True)
        ]
        return ENCODER.encode(self._completion(written, usage(choices), receipt(self.call, self.record_id)))

    def opening(self, choices: Sequence[Choice]) -> bytes:
        if not self.call.echo:
            return b""
        return b"".join(self._chunk([TextChoice(choice.index, self._echo(choice.index))]) for choice in choices)

    def delta(self, delta: Delta) -> bytes:
        if not delta.text and not delta.tokens:
            return b""
        return self._chunk([TextChoice(delta.index, delta.text, self._logprobs(delta.index, delta.tokens))])

    def ended(self, delta: Delta, choice: Choice) -> bytes:
        return self._chunk([TextChoice(delta.index, "", finish_reason=_FINISH[choice.generation.ending])])

    def closing(self, delta: Delta, choices: Sequence[Choice]) -> bytes:
        last = TextChoice(delta.index, "", finish_reason=_FINISH[choices[delta.index].generation.ending])
        used = self._chunk([], usage(choices)) if self.call.include_usage else b""
        return self._chunk([last], reef=receipt(self.call, self.record_id)) + used + b"data: [DONE]\n\n"

    def failure(self, error: ReefError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    def _echo(self, index: int) -> str:
        prompt = self.call.prompts[index // self.call.n]
        return prompt if self.call.echo and isinstance(prompt, str) else ""

    def _logprobs(self, index: int, tokens: list[TokenLogprob]) -> Logprobs | None:
        if not self.call.logprobs:
            return None
        shown = Logprobs([], [], [], [])
        for token in tokens:
            text, offset = readable(token.token), self._offsets.get(index, 0)
            shown.tokens.append(text)
            shown.token_logprobs.append(finite(token.logprob))
            shown.top_logprobs.append({readable(other): finite(value) for other, value in token.top})
            shown.text_offset.append(offset)
            self._offsets[index] = offset + len(text)
        return shown

    def _chunk(self, choices: list[TextChoice], used: Usage | None = None, reef: Receipt | UnsetType = UNSET) -> bytes:
        return event(self._completion(choices, used if self.call.include_usage else UNSET, reef))

    def _completion(
        self, choices: list[TextChoice], used: Usage | UnsetType | None, reef: Receipt | UnsetType
    ) -> Completion:
        return Completion(f"cmpl-{self.record_id}", self.created, self.model, choices, used, reef)


COMPLETIONS = Api("/v1/completions", parse_completion, CompletionWriter)
