"""Assistant turns that Reef sampled, so that a continued conversation keeps their token ids.

Tokenizing an answer's text again need not give the tokens that were sampled. A conversation that goes on from an
answer of ours therefore starts with the recorded ids of prompt and answer, and only what follows is tokenized.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from reef.inference.chat.messages import Message

_ENCODER = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class _Turn:
    ids: array[int]  # prompt and output
    text_length: int
    text_digest: bytes  # of the rendered text that the ids stand for


class SampledTurns:
    """An LRU of conversations that ended in an answer of ours, bounded by the tokens it holds."""

    def __init__(self, max_tokens: int = 4_000_000) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()

    def remember(self, lane: str, messages: Sequence[Message], answer: str, text: str, ids: Sequence[int]) -> None:
        """`text` is the rendered prompt with the decoded output, special tokens included; `ids` are its tokens."""
        key = _keys(lane, [*messages, Message(role="assistant", content=answer)])[-1]
        self._forget(key)
        if len(ids) > self._max_tokens:
            return
        self._turns[key] = _Turn(array("I", ids), len(text), _digest(text))
        self._tokens += len(ids)
        while self._tokens > self._max_tokens:
            self._forget(next(iter(self._turns)))

    def longest_prefix(self, lane: str, messages: Sequence[Message], text: str) -> tuple[list[int], int]:
        """Recorded ids for the longest beginning of `text` that is known, and its length in characters."""
        if self._turns and any(message.role == "assistant" for message in messages):
            keys = _keys(lane, messages)
            for position in range(len(messages) - 1, -1, -1):
                turn = self._turns.get(keys[position]) if messages[position].role == "assistant" else None
                if turn is not None and _digest(text[: turn.text_length]) == turn.text_digest:
                    self._turns.move_to_end(keys[position])
                    return turn.ids.tolist(), turn.text_length
        return [], 0

    def _forget(self, key: bytes) -> None:
        turn = self._turns.pop(key, None)
        if turn is not None:
            self._tokens -= len(turn.ids)


def _keys(lane: str, messages: Sequence[Message]) -> list[bytes]:
    """One key per message, of the conversation up to and including it."""
    state = blake2b(lane.encode(), digest_size=16)
    keys = []
    for message in messages:
        encoded = _ENCODER.encode(message)
        state.update(len(encoded).to_bytes(4, "big") + encoded)
        keys.append(state.digest())
    return keys


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
