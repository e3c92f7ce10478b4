"""Stored chat completions (platform.openai.com/docs/api-reference/chat/list), read from what was recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from reef.runtime.interfaces import Generation
from reef.service.wire.openai import PageQuery

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class MetadataBody(Struct, forbid_unknown_fields=True):
    """What a stored completion can be changed in; null: none any more."""

    metadata: Metadata | None


class CompletionsQuery(PageQuery, forbid_unknown_fields=True):
    """`model`: the one that was asked for, or the one that served."""

    model: str | None = None
    metadata: dict[str, str] | None = None


class Asked(Struct):
    """What finds a completion: how it was asked for, and the model that served."""

    model: str = ""
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    served: str = ""

    def matches(self, query: CompletionsQuery) -> bool:
        own = self.metadata or {}
        wanted = query.metadata or {}
        return query.model in (None, self.model, self.served) and all(own.get(key) == wanted[key] for key in wanted)


class _Served(Struct):
    model: str


_ASKED = msgspec.json.Decoder(Asked)
_SERVED = msgspec.json.Decoder(_Served)
_DONE = b"data: [DONE]\n\n"


def read_asked(request: bytes, response: bytes) -> Asked | None:
    """None: it is not to be found again, because nobody asked for that or because it never came to an end."""
    asked = _ASKED.decode(request)
    whole = response.startswith(b"{")
    if not asked.store or not (whole or response.endswith(_DONE)):
        return None
    asked.served = _SERVED.decode(response if whole else response.partition(b"\n")[0].removeprefix(b"data: ")).model
    return asked


def completion_of(response: bytes, generations: Sequence[Generation]) -> dict[str, Any]:
    """The completion that a client was sent, whole or in chunks."""
    if response.startswith(b"{"):
        completion: dict[str, Any] = json.loads(response)
        return completion
    parts = response.removesuffix(_DONE).split(b"\n\n")[:-1]
    return _assembled([json.loads(part.removeprefix(b"data: ")) for part in parts], generations)


def messages_of(request: bytes, completion_id: str) -> list[dict[str, Any]]:
    """The turns that were sent, each with an id."""
    found = []
    for index, turn in enumerate(json.loads(request)["messages"]):
        content = turn.get("content")
        parts = content if isinstance(content, list) else None
        if parts is not None:
            content = "".join(part.get("text") or part.get("refusal") or "" for part in parts)
        shown = {"id": f"{completion_id}-{index}", "content": content, "content_parts": parts}
        found.append({"name": None, **turn, **shown})
    return found


def _assembled(chunks: Sequence[dict[str, Any]], generations: Sequence[Generation]) -> dict[str, Any]:
    first = chunks[0]
    choices = [_Choice(index) for index in range(len(generations))]
    prompt = len(generations[0].prompt_ids)
    output = sum(len(generation.output_ids) for generation in generations)
    found = {
        **{name: first[name] for name in ("id", "created", "model")},
        "object": "chat.completion",
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
    }
    for chunk in chunks:
        found |= {name: chunk[name] for name in ("usage", "reef") if chunk.get(name)}
        for piece in chunk["choices"]:
            choices[piece["index"]].add(piece)
    return {**found, "choices": [choice.shape() for choice in choices]}


class _Choice:
    """One choice, put together from its pieces."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._calls: list[dict[str, Any]] = []
        self._function: dict[str, str] | None = None
        self._logprobs: list[Any] | None = None
        self._finish_reason: str | None = None

    def add(self, piece: dict[str, Any]) -> None:
        delta = piece["delta"]
        for name, texts in self._texts.items():
            texts.append(delta.get(name) or "")
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                self._calls.append({name: call[name] for name in ("id", "function", "type")})
            else:
                self._calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if (function := delta.get("function_call")) is not None:
            before = self._function or {"arguments": ""}
            self._function = {**before, **function, "arguments": before["arguments"] + function["arguments"]}
        if piece["logprobs"] is not None:
            self._logprobs = (self._logprobs or []) + piece["logprobs"]["content"]
        self._finish_reason = piece["finish_reason"]

    def shape(self) -> dict[str, Any]:
        text, reasoning = ("".join(texts) for texts in self._texts.values())
        called = {"tool_calls": self._calls, "function_call": self._function, "reasoning_content": reasoning}
        said = {name: value for name, value in called.items() if value}
        content = text or (None if self._calls or self._function else "")
        return {
            "index": self._index,
            "message": {"role": "assistant", "content": content, "refusal": None, **said},
            "logprobs": None if self._logprobs is None else {"content": self._logprobs, "refusal": None},
            "finish_reason": self._finish_reason,
        }
