"""What an answer is made of."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from reef.inference.chat.messages import Message, ToolCall


class Kind(enum.Enum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"  # begins a tool call; the piece's text is the function's name
    ARGUMENTS = "arguments"  # of the call that began last


@dataclass(slots=True, frozen=True)
class Piece:
    kind: Kind
    text: str


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind as one; each call stays its own."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].kind is piece.kind and piece.kind is not Kind.CALL:
            found[-1] = Piece(piece.kind, found[-1].text + piece.text)
        elif piece.text or piece.kind is Kind.CALL:
            found.append(piece)
    return found


class Answer:
    """The assistant's turn as it grows. Call ids begin with `id_prefix`, so that the same answer has the same ids."""

    def __init__(self, id_prefix: str = "call_") -> None:
        self._id_prefix = id_prefix
        self._texts: dict[Kind, list[str]] = {Kind.TEXT: [], Kind.REASONING: []}
        self._calls: list[tuple[str, list[str]]] = []

    @property
    def text(self) -> str:
        return "".join(self._texts[Kind.TEXT])

    @property
    def reasoning(self) -> str:
        return "".join(self._texts[Kind.REASONING])

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(self.call_id(index), name, "".join(arguments))
            for index, (name, arguments) in enumerate(self._calls)
        )

    def call_id(self, index: int) -> str:
        return f"{self._id_prefix}{index}"

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.kind is Kind.CALL:
                self._calls.append((piece.text, []))
            elif piece.kind is Kind.ARGUMENTS:
                self._calls[-1][1].append(piece.text)
            else:
                self._texts[piece.kind].append(piece.text)

    def message(self, prefill: str = "") -> Message:
        return Message(
            role="assistant", content=prefill + self.text, reasoning=self.reasoning, tool_calls=self.tool_calls
        )
