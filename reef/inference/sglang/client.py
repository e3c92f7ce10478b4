"""The service's side of SGLang: token ids in, token chunks out, streamed from the router or the only engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from reef.errors import ConfigError, InvalidRequest, ReefError, Unavailable, VerificationError
from reef.inference.local.validation import check_request
from reef.inference.sglang.control import EngineControl, EngineState, Refused
from reef.inference.sglang.events import refused, stream_events
from reef.runtime.interfaces import (
    Ending,
    GenerateRequest,
    Grammar,
    InferenceHandler,
    OutgoingRequest,
    SamplingParams,
    TokenChunk,
)

_STATE_SECONDS = 60.0
_DONE = b"[DONE]"
_INT64 = 2**63 - 1  # SGLang's seeds are signed


class _Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """`inference.handler-config` of this handler."""

    connect_timeout: Annotated[float, msgspec.Meta(gt=0)] = 30.0


class _Meta(msgspec.Struct):
    """`meta_info` of one streamed event; lists have an entry per token of the event."""

    finish_reason: dict[str, Any] | None = None
    output_token_logprobs: list[tuple[float, int, Any]] = []
    output_top_logprobs: list[list[tuple[float, int, Any]] | None] = []
    cached_tokens: int = 0
    reef_weights: list[str] = []
    reef_drawn: list[float] = []
    reef_load: str = ""
    reef_under: str = ""


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: dict[str, Any] | None = None


class SGLangHandler(InferenceHandler):
    """`endpoints` returns where requests go (a router, or the only engine), then every engine, whenever it is asked."""

    def __init__(self, endpoints: Callable[[], Sequence[str]], *, connect_timeout: float = 30.0) -> None:
        self._endpoints = endpoints
        self._connect_timeout = connect_timeout
        self._url: str | None = None
        self._max_context = self._vocab_size = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], endpoints: Callable[[], Sequence[str]]) -> SGLangHandler:
        """Keys: connect-timeout (seconds)."""
        try:
            options = msgspec.convert(dict(config), _Options)
        except msgspec.ValidationError as error:
            raise ConfigError(f"inference.handler-config: {error}") from error
        return cls(endpoints, connect_timeout=options.connect_timeout)

    async def connect(self) -> None:
        """Raises Unavailable when an engine does not answer, VerificationError when one lacks Reef's plugin."""
        try:
            traffic, *engines = self._endpoints()
            states = await asyncio.gather(*(asyncio.to_thread(_state, url) for url in engines))
        except Refused as error:
            raise VerificationError(f"an engine without Reef's plugin: {error}") from error
        except ReefError as error:
            raise Unavailable(str(error)) from error
        self._max_context = min(state.max_context for state in states)
        self._vocab_size = min(state.vocab_size for state in states)
        self._url = traffic

    async def close(self) -> None:
        self._url = None

    @property
    def max_context(self) -> int:
        if not self._max_context:
            raise Unavailable("the engine was never connected")
        return self._max_context

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if self._url is None:
            raise Unavailable("the engine is not connected")
        self._check(request)
        body = _body(request)
        headers = self.prepare(OutgoingRequest(request.request_id, request.lane, "/generate", body))
        events = stream_events(self._url, "/generate", body, self._connect_timeout, headers)
        load, error = "", ReefError("the engine ended the answer without a reason")
        try:
            async for data in events:
                if data == _DONE:
                    break
                event = msgspec.json.decode(data, type=_Event)
                if (refusal := _refusal(event)) is not None:
                    raise refusal
                for chunk in _chunks(request.request_id, event):
                    load = chunk.runtime_load_id
                    yield chunk
                    if chunk.ending is not None:
                        return
        except ReefError as failure:
            error = failure
        except (OSError, msgspec.DecodeError) as failure:
            error = Unavailable(f"the engine was lost: {failure}")
        finally:
            await events.aclose()
        if not load:
            raise error
        yield _cut(request.request_id, load, str(error))

    def _check(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest for what SGLang cannot honour."""
        check_request(request, vocab_size=self._vocab_size, max_context=self._max_context)
        sampling = request.sampling
        if sampling.ignore_eos and sampling.stop_token_ids:
            raise InvalidRequest("stop_token_ids cannot be combined with ignore_eos here", "sampling.stop_token_ids")


def _state(url: str) -> EngineState:
    return EngineControl(url, url, _STATE_SECONDS).state()


def _body(request: GenerateRequest) -> bytes:
    if request.runtime_load_id is not None:
        weights = f"reef:load:{request.runtime_load_id}"
    else:
        weights = f"reef:lane:{request.lane}"
    return msgspec.json.encode(
        {
            "input_ids": request.prompt_ids,
            "sampling_params": _sampling(request.sampling),
            "stream": True,
            "return_logprob": True,
            "top_logprobs_num": request.sampling.top_logprobs,
            "lora_path": weights,
        }
    )


def _sampling(params: SamplingParams) -> dict[str, Any]:
    return {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()} or None,
        "stop": params.stop or None,
        "stop_token_ids": params.stop_token_ids or None,
        "ignore_eos": params.ignore_eos,
        "sampling_seed": None if params.seed is None else params.seed & _INT64,
        "skip_special_tokens": False,
        **_grammar(params.grammar),
    }


def _grammar(grammar: Grammar | None) -> dict[str, str]:
    if grammar is None:
        return {}
    if grammar.kind == "json_schema":
        return {"json_schema": grammar.value}
    if grammar.kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if grammar.kind == "regex":
        return {"regex": grammar.value}
    if grammar.kind == "lark":
        return {"ebnf": grammar.value}  # as llguidance takes it; SGLang's other grammar backends refuse it
    if grammar.kind == "choice":
        return {"regex": "|".join(f"({re.escape(text)})" for text in json.loads(grammar.value))}
    raise InvalidRequest(f"grammar of kind {grammar.kind!r} is not supported by this engine", "sampling.grammar")


def _refusal(event: _Event) -> ReefError | None:
    """What SGLang says in place of an answer, or when its scheduler gives a request up for the caller's fault."""
    reason = (event.meta_info.finish_reason if event.meta_info is not None else None) or {}
    status = event.error.get("code") if event.error is not None else reason.get("status_code")
    if event.error is None and status is None:
        return None
    return refused(int(status or 500), str((event.error or reason).get("message")))


def _chunks(request_id: str, event: _Event) -> list[TokenChunk]:
    """One chunk per run of tokens from the same load; the last carries the ending."""
    meta = event.meta_info or _Meta()
    ids = event.output_ids
    loads = [meta.reef_load if weights == meta.reef_under else weights for weights in meta.reef_weights]
    starts = [index for index in range(len(ids)) if index == 0 or loads[index] != loads[index - 1]] or [0]
    chunks: list[TokenChunk] = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        chunks.append(
            TokenChunk(
                request_id=request_id,
                token_ids=ids[start:end],
                logprobs=[entry[0] for entry in meta.output_token_logprobs[start:end]],
                sampled_logprobs=meta.reef_drawn[start:end],
                runtime_load_id=loads[start] if ids else meta.reef_load,
                top_logprobs=[
                    [(entry[1], entry[0]) for entry in top or ()] for top in meta.output_top_logprobs[start:end]
                ],
                cached_tokens=meta.cached_tokens,
            )
        )
    if meta.finish_reason is not None:
        _end(chunks[-1], meta.finish_reason)
    return chunks


def _end(chunk: TokenChunk, reason: dict[str, Any]) -> None:
    kind = reason.get("type")
    chunk.ending = {"stop": Ending.STOP, "length": Ending.LENGTH}.get(str(kind), Ending.ENGINE_CUT)
    if chunk.ending is Ending.ENGINE_CUT:
        chunk.error = str(reason.get("message") or kind)
    matched = reason.get("matched")
    chunk.stopped_by = matched if isinstance(matched, str) else None


def _cut(request_id: str, load: str, reason: str) -> TokenChunk:
    return TokenChunk(
        request_id=request_id,
        token_ids=[],
        logprobs=[],
        sampled_logprobs=[],
        runtime_load_id=load,
        ending=Ending.ENGINE_CUT,
        error=reason,
    )
