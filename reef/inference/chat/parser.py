"""What a model wrote, taken apart as it comes: text, reasoning, tool calls. Any chunking gives the same result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reef.inference.chat.calls import FunctionScanner, ObjectScanner
from reef.inference.chat.detokenizer import longest_beginning
from reef.inference.chat.formats import Table
from reef.inference.chat.pieces import Kind, Piece, joined
from reef.inference.chat.sections import Calls, Header, Name, Section, Text, Trimmed


class OutputParser:
    """Feed it the output's text, names of special tokens that are markers included; it returns pieces.

    What begins like a call and turns out to be none is given back as text, as it was written.
    """

    def __init__(self, table: Table, tools: Mapping[str, Any] | None = None, *, start: str = "") -> None:
        """`tools` maps names to parameter schemas. The prompt may have begun `start` already: reasoning, or text."""
        self._table = table
        self._tools = tools or {}
        self._buffer = ""
        self._lead: str | None = None  # what led here since text ended, while no call came of it
        self._began = False  # something came before this section
        self._ended = 0
        self._mode = start or table.start
        self._section = self._new_section("")
        self._plain = self._mode == "text" and not table.modes["text"].exits and not table.openings

    @property
    def in_text(self) -> bool:
        return self._mode == "text"

    @property
    def in_reasoning(self) -> bool:
        return self._mode == "reasoning"

    @property
    def calls_ended(self) -> int:
        """Complete tool calls so far."""
        return self._ended + self._section.ended

    def push(self, text: str) -> list[Piece]:
        """Take more of the output; return what is certain now."""
        if self._plain:
            return [Piece(Kind.TEXT, text)] if text else []
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer:
            before = (len(self._buffer), self._mode)
            pieces += self._step()
            if before == (len(self._buffer), self._mode):
                break
        return joined(pieces)

    def finish(self) -> list[Piece]:
        """The output is over: return what was held back."""
        pieces: list[Piece] = []
        while self._buffer:  # a row of calls that breaks puts some of it back
            rest, self._buffer = self._buffer, ""
            pieces += self._feed(rest)
        section = self._section
        pieces += section.finish()
        if self._lead is not None:
            pieces.append(Piece(Kind.TEXT, self._lead + section.unread))
        elif isinstance(section, Header) and not self._began:
            pieces.append(Piece(Kind.TEXT, section.unread))
        elif isinstance(section, Calls):
            pieces.append(Piece(Kind.TEXT, section.lost))
        self._ended += section.ended
        self._section = Section()
        return joined(pieces)

    def _step(self) -> list[Piece]:
        """Handle what can be handled now; what remains in the buffer unchanged has to wait."""
        if isinstance(self._section, Text) and self._section.fresh and self._table.openings:
            inside = self._buffer.lstrip()
            for marker, mode in self._table.openings.items():
                if inside.startswith(marker):
                    consumed = self._table.modes[mode].handler != "objects"
                    self._buffer = inside[len(marker) :] if consumed else inside
                    return self._enter(mode, marker if consumed else "")
            if any(marker.startswith(inside) for marker in self._table.openings):
                return []
            self._section.fresh = False
        exits = self._table.modes[self._mode].exits
        found = [(at + len(marker), at, marker) for marker in exits if (at := self._buffer.find(marker)) >= 0]
        end, start, marker = min(found, default=(0, len(self._buffer) - longest_beginning(self._buffer, exits), ""))
        if start or not marker:
            text, self._buffer = self._buffer[:start], self._buffer[start:]
            return self._feed(text) if text else []
        self._buffer = self._buffer[end:]
        return self._leave(marker)

    def _feed(self, text: str) -> list[Piece]:
        section = self._section
        pieces = section.feed(text)
        if any(piece.kind is Kind.CALL for piece in pieces):
            self._lead = None
        if isinstance(section, Calls) and section.broken and not self._table.modes[self._mode].exits:
            pieces += self._go_on_as_text(section)
        return pieces

    def _go_on_as_text(self, section: Calls) -> list[Piece]:
        """Nothing says where a row of calls ends, so what is no call ends it."""
        self._ended += section.ended
        lead, self._lead = self._lead, None
        self._buffer = (section.unread if lead is not None else section.after_calls) + self._buffer
        self._mode = "text"
        self._section = text = Text(after_another=False, plain=False)
        text.fresh = False
        return [Piece(Kind.TEXT, lead or "")]

    def _leave(self, marker: str) -> list[Piece]:
        """`marker` ends the section."""
        section = self._section
        pieces = section.close()
        if any(piece.kind is Kind.CALL for piece in pieces):
            self._lead = None
        elif self._lead is not None:
            self._lead += section.unread
        self._ended += section.ended
        mode = section.mode() if isinstance(section, Header) else self._table.modes[self._mode].exits[marker]
        return pieces + self._enter(mode, marker)

    def _enter(self, mode: str, marker: str) -> list[Piece]:
        """Begin the section to which `marker` leads; give back as text what became of no call."""
        pieces: list[Piece] = []
        was, self._mode, self._began = self._section, mode, True
        handler = self._table.modes[mode].handler
        if self._lead is not None:
            self._lead += marker
        elif handler in ("name", "objects", "functions") or (isinstance(was, Text) and handler == "skip"):
            self._lead = (was.space if isinstance(was, Text) else "") + marker
        self._section = self._new_section(marker)
        if self._lead is not None and isinstance(self._section, Text):
            pieces, self._lead = [Piece(Kind.TEXT, self._lead)], None
            self._section = Text(after_another=False, plain=False)
            self._section.fresh = False
        return pieces

    def _new_section(self, marker: str) -> Section:
        mode = self._table.modes[self._mode]
        if mode.handler == "text":
            return Text(after_another=self._began, plain=not mode.exits and not self._table.openings)
        if mode.handler == "reasoning":
            return Trimmed(Kind.REASONING)
        if mode.handler == "arguments":
            return Trimmed(Kind.ARGUMENTS)
        if mode.handler == "name":
            return Name()
        if mode.handler == "objects":
            bare = not mode.exits and not marker
            return Calls(ObjectScanner(self._tools if bare else None))
        if mode.handler == "functions":
            return Calls(FunctionScanner(self._tools))
        return Header() if mode.handler == "header" else Section()
