"""OpenAI Responses: answers, whole or as events (platform.openai.com/docs/api-reference/responses-streaming)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from reef.errors import ReefError
from reef.inference.chat.choice import Choice, Delta, TokenLogprob
from reef.inference.chat.pieces import Kind
from reef.runtime.interfaces import Ending
from reef.service.wire.base import Api, ChatCall, Writer
from reef.service.wire.openai import ENCODER, error_detail, named_event, shown
from reef.service.wire.responses import ID_PREFIX, ResponsesCall, parse_responses


class _Item:
    """One output item as it grows."""

    def __init__(self, kind: Kind, item_id: str, **fields: Any) -> None:
        self.kind = kind
        self.id = item_id
        self._fields = fields
        self._texts: list[str] = []
        self.logprobs: list[Any] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, text: str) -> None:
        self._texts.append(text)

    def part(self, text: str) -> dict[str, Any]:
        if self.kind is Kind.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    def shape(self, status: str) -> dict[str, Any]:
        """The item as JSON; while it is in progress it has no content."""
        done = status != "in_progress"
        if self.kind is Kind.CALL:
            arguments = self.text if done else ""
            return {"type": "function_call", "id": self.id, "status": status, "arguments": arguments, **self._fields}
        content = [self.part(self.text)] if done else []
        if self.kind is Kind.REASONING:
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": self.id, "role": "assistant", "status": status, "content": content}


class ResponsesWriter(Writer):
    """One item is open at a time; the whole answer is written by the same steps as the stream."""

    def __init__(self, call: ChatCall, record_id: str, created: int, model: str) -> None:
        super().__init__(call, record_id, created, model)
        assert isinstance(call, ResponsesCall)
        self._echoed = call.echoed if call.recorded else {**call.echoed, "store": False}
        self._events = 0
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._done: list[dict[str, Any]] = []
        self._choice: Choice | None = None

    def whole(self, choices: Sequence[Choice], deltas: Sequence[list[Delta]]) -> bytes:
        self._choice = choices[0]
        for delta in deltas[0]:
            self.delta(delta)
        self._end()
        return ENCODER.encode(self._final())

    def opening(self, choices: Sequence[Choice]) -> bytes:
        self._choice = choices[0]
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        parts = []
        tokens = delta.tokens
        for piece in delta.pieces:
            if piece.kind is Kind.CALL:
                parts.append(self._begin(Kind.CALL, piece.text))
                continue
            kind = Kind.CALL if piece.kind is Kind.ARGUMENTS else piece.kind
            if self._open is None or self._open.kind is not kind:
                parts.append(self._begin(kind))
            parts.append(self._add(piece.text, tokens if kind is Kind.TEXT else []))
            tokens = [] if kind is Kind.TEXT else tokens
        return b"".join(parts)

    def ended(self, delta: Delta, choice: Choice) -> bytes:
        return b""  # there is one choice only

    def closing(self, delta: Delta, choices: Sequence[Choice]) -> bytes:
        end = self._end()
        final = self._final()
        return end + self._event(f"response.{final['status']}", response=final)

    def failure(self, error: ReefError) -> bytes:
        """The fields of the event as documented, and the object that client libraries look for."""
        detail = error_detail(error)
        return self._event("error", code=detail["code"], message=detail["message"], param=detail["param"], error=detail)

    # ------------------------------------------------------------------ items

    def _begin(self, kind: Kind, name: str = "") -> bytes:
        end = self._end()
        number = len(self._items)
        prefix = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}[kind]
        item = _Item(kind, f"{prefix}_{self.record_id}_{number}")
        if kind is Kind.CALL:
            assert self._choice is not None
            calls = sum(earlier.kind is Kind.CALL for earlier in self._items)
            item = _Item(kind, item.id, name=name, call_id=self._choice.answer.call_id(calls))
        self._items.append(item)
        self._open = item
        added = self._event("response.output_item.added", output_index=number, item=item.shape("in_progress"))
        if kind is Kind.CALL:
            return end + added
        return end + added + self._in_item("response.content_part.added", content_index=0, part=item.part(""))

    def _add(self, text: str, tokens: list[TokenLogprob]) -> bytes:
        item = self._open
        assert item is not None
        item.add(text)
        if item.kind is Kind.CALL:
            return self._in_item("response.function_call_arguments.delta", delta=text)
        if item.kind is Kind.REASONING:
            return self._in_item("response.reasoning_text.delta", content_index=0, delta=text)
        logprobs = [msgspec.to_builtins(shown(token)) for token in tokens]
        item.logprobs += logprobs
        return self._in_item("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _end(self) -> bytes:
        item = self._open
        if item is None:
            return b""
        cut = self._choice is not None and self._choice.ending is Ending.LENGTH
        shape = item.shape("incomplete" if cut else "completed")
        self._done.append(shape)
        number = len(self._items) - 1
        parts = []
        if item.kind is Kind.CALL:
            parts.append(self._in_item("response.function_call_arguments.done", arguments=item.text))
        elif item.kind is Kind.REASONING:
            parts.append(self._in_item("response.reasoning_text.done", content_index=0, text=item.text))
        else:
            parts.append(
                self._in_item("response.output_text.done", content_index=0, text=item.text, logprobs=item.logprobs)
            )
        if item.kind is not Kind.CALL:
            parts.append(self._in_item("response.content_part.done", content_index=0, part=item.part(item.text)))
        parts.append(self._event("response.output_item.done", output_index=number, item=shape))
        self._open = None
        return b"".join(parts)

    # ------------------------------------------------------------------ events

    def _in_item(self, name: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(name, item_id=self._open.id, output_index=len(self._items) - 1, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        self._events += 1
        return named_event(name, sequence_number=self._events - 1, **fields)

    def _final(self) -> dict[str, Any]:
        assert self._choice is not None
        cut = self._choice.generation.ending is Ending.LENGTH
        response = self._response("incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response |= {
            "output": self._done,
            "usage": _usage(self._choice),
            "completed_at": self.created,
        }
        if self.call.recorded:
            response["reef"] = {"agent_record_id": self.record_id}
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": ID_PREFIX + self.record_id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [],
            "usage": None,
            **self._echoed,
        }


def _usage(choice: Choice) -> dict[str, Any]:
    generation = choice.generation
    prompt, output = len(generation.prompt_ids), len(generation.output_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": prompt + output,
    }


RESPONSES = Api("/v1/responses", parse_responses, ResponsesWriter)
