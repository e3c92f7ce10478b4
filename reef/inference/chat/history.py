"""Assistant turns that Reef sampled, so that a continued conversation keeps their token ids.

Tokenizing an answer's text again need not give the tokens that were sampled. A conversation that goes on from an
answer of ours therefore starts with the recorded ids of prompt and answer, and only what follows is tokenized.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
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
    context: bytes  # what shaped the prompt besides the messages
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
    """An LRU of conversations that ended in an answer of ours, bounded by the tokens it holds.

    The same conversation may have had the same answer several times, sampled in different tokens.
    """

    def __init__(self, max_tokens: int = 4_000_000) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._turns: OrderedDict[tuple[bytes, str], Turn] = OrderedDict()  # by conversation and receipt
        self._answers: dict[bytes, list[str]] = {}  # receipts by the conversation that the answer ends
        self._asked: dict[bytes, list[str]] = {}  # receipts by the conversation that was asked

    def remember(
        self,
        lane: str,
        context: bytes,
        messages: Sequence[Message],
        answer: Message,
        text: str,
        ids: Sequence[int],
        *,
        num_prompt: int,
        receipt: str,
    ) -> None:
        """`context` stands for all that shapes the prompt besides `messages`: tools, options of the template."""
        if len(ids) > self._max_tokens:
            return
        *_, asked, key = _keys(lane, [*messages, answer])
        self._forget(key, receipt)
        self._turns[key, receipt] = Turn(
            receipt, answer, array("I", ids), num_prompt, context, asked, len(text), _digest(text)
        )
        self._answers.setdefault(key, []).append(receipt)
        self._asked.setdefault(asked, []).append(receipt)
        self._tokens += len(ids)
        while self._tokens > self._max_tokens:
            self._forget(*next(iter(self._turns)))

    def look_up(self, lane: str, context: bytes, messages: Sequence[Message], receipts: Container[str] = ()) -> Known:
        """Which of the assistant's turns are answers of ours, each to exactly what precedes it.

        `receipts` are those of answers that the conversation is known to hold.
        """
        known = Known()
        if not self._turns or not any(message.role == "assistant" for message in messages):
            return known
        keys = _keys(lane, messages)
        for position, message in enumerate(messages):
            if message.role != "assistant":
                continue
            turn = self._turn(keys[position + 1], message, context, receipts)
            if turn is not None:
                known.turns[position] = turn
                known.fork_of = None
            elif known.fork_of is None and (answers := self._asked.get(keys[position])):
                known.fork_of = answers[-1]
        return known

    def _turn(self, key: bytes, message: Message, context: bytes, receipts: Container[str]) -> Turn | None:
        """The likeliest of the answers that read like this: call ids tell, a receipt, the context; else the newest."""
        turns = [self._turns[key, receipt] for receipt in self._answers.get(key, ())]
        calls = {call.id for call in message.tool_calls}
        turns = [turn for turn in turns if message.reasoning.strip() in ("", turn.message.reasoning.strip())]
        if not turns:
            return None
        by_calls = [turn for turn in turns if calls and calls == {call.id for call in turn.message.tool_calls}]
        by_receipt = [turn for turn in turns if turn.receipt in receipts]
        by_context = [turn for turn in turns if turn.context == context]
        found = (by_calls or by_receipt or by_context or turns)[-1]
        self._turns.move_to_end((key, found.receipt))
        return found

    def _forget(self, key: bytes, receipt: str) -> None:
        turn = self._turns.pop((key, receipt), None)
        if turn is None:
            return
        self._tokens -= len(turn.ids)
        for receipts, place in ((self._answers, key), (self._asked, turn.asked)):
            receipts[place].remove(receipt)
            if not receipts[place]:
                del receipts[place]


def context_of(tools: Sequence[Tool], options: Mapping[str, Any]) -> bytes:
    """One value for everything that shapes a prompt besides its messages."""
    described = _ENCODER.encode([[tool.for_template() for tool in tools], dict(sorted(options.items()))])
    return blake2b(described, digest_size=16).digest()


def _keys(lane: str, messages: Sequence[Message]) -> list[bytes]:
    """One key per beginning of the conversation: of no message, of the first one, of the first two, ..."""
    state = blake2b(lane.encode(), digest_size=16)
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
