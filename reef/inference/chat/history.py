"""Assistant turns that Reef sampled, so that a continued conversation keeps their token ids.

Tokenizing an answer's text again need not give the tokens that were sampled. A conversation that goes on from an
answer of ours therefore starts with the recorded ids of prompt and answer, and only what follows is tokenized.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from reef.inference.chat.messages import Message, Tool

_ENCODER = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class Turn:
    """An answer of ours. `ids` [num_tokens] are prompt and output; the text is what the template made of the prompt,
    and the output as it was sampled, special tokens included."""

    receipt: str
    message: Message
    ids: array[int]
    num_prompt: int
    asked: bytes  # key of what was asked
    text_length: int
    text_digest: bytes

    def begins(self, text: str) -> bool:
        """Whether `text` begins with exactly this."""
        return len(text) >= self.text_length and _digest(text[: self.text_length]) == self.text_digest


@dataclass(slots=True)
class Known:
    """What is known of a conversation: answers of ours by the position of their message.

    `fork_of` is the receipt of an answer in whose place the conversation has another one, after the last of ours.
    """

    turns: dict[int, Turn] = field(default_factory=dict)
    fork_of: str | None = None

    @property
    def parent_id(self) -> str | None:
        """Receipt of the last answer of ours."""
        return self.turns[max(self.turns)].receipt if self.turns else None


class SampledTurns:
    """An LRU of conversations that ended in an answer of ours, bounded by the tokens it holds."""

    def __init__(self, max_tokens: int = 4_000_000) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()
        self._asked: dict[bytes, list[bytes]] = {}  # key of what was asked -> keys of the answers

    def remember(
        self,
        context: bytes,
        messages: Sequence[Message],
        answer: Message,
        text: str,
        ids: Sequence[int],
        *,
        num_prompt: int,
        receipt: str,
    ) -> None:
        """`context` stands for all that shapes the prompt besides `messages`."""
        if len(ids) > self._max_tokens:
            return
        *_, asked, key = _keys(context, [*messages, answer])
        self._forget(key)
        self._turns[key] = Turn(receipt, answer, array("I", ids), num_prompt, asked, len(text), _digest(text))
        self._asked.setdefault(asked, []).append(key)
        self._tokens += len(ids)
        while self._tokens > self._max_tokens:
            self._forget(next(iter(self._turns)))

    def look_up(self, context: bytes, messages: Sequence[Message]) -> Known:
        """Which of the assistant's turns are answers of ours, each to exactly what precedes it."""
        known = Known()
        if not self._turns or not any(message.role == "assistant" for message in messages):
            return known
        keys = _keys(context, messages)
        for position, message in enumerate(messages):
            if message.role != "assistant":
                continue
            turn = self._turns.get(keys[position + 1])
            if turn is not None and message.reasoning.strip() in ("", turn.message.reasoning.strip()):
                self._turns.move_to_end(keys[position + 1])
                known.turns[position] = turn
                known.fork_of = None
            elif known.fork_of is None and (answers := self._asked.get(keys[position])):
                known.fork_of = self._turns[answers[-1]].receipt
        return known

    def _forget(self, key: bytes) -> None:
        turn = self._turns.pop(key, None)
        if turn is None:
            return
        self._tokens -= len(turn.ids)
        answers = self._asked[turn.asked]
        answers.remove(key)
        if not answers:
            del self._asked[turn.asked]


def context_of(lane: str, tools: Sequence[Tool], options: Mapping[str, Any]) -> bytes:
    """One value for everything that shapes a prompt besides its messages."""
    described = _ENCODER.encode([lane, [tool.for_template() for tool in tools], dict(sorted(options.items()))])
    return blake2b(described, digest_size=16).digest()


def _keys(context: bytes, messages: Sequence[Message]) -> list[bytes]:
    """One key per beginning of the conversation: of no message, of the first one, of the first two, ..."""
    state = blake2b(context, digest_size=16)
    keys = [state.digest()]
    for message in messages:
        encoded = _ENCODER.encode(_identity(message))
        state.update(len(encoded).to_bytes(4, "big") + encoded)
        keys.append(state.digest())
    return keys


def _identity(message: Message) -> list[Any]:
    """What makes two turns the same: not the ids of calls, which some clients rewrite, nor how arguments are spaced."""
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = [[call.name, _canonical(call.arguments)] for call in message.tool_calls]
    return [message.role, content, message.name, calls]


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
