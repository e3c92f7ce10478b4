"""Stretches of an output, each of one nature. The parser begins and ends them where it finds markers."""

from __future__ import annotations

import re

from reef.inference.chat.calls import BETWEEN, CallScanner
from reef.inference.chat.pieces import Kind, Piece

_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


class Section:
    """Text whose markers the parser handles: nothing comes of it. `unread` is what has come to nothing so far."""

    def __init__(self) -> None:
        self.unread = ""
        self.ended = 0  # tool calls that are complete

    def feed(self, text: str) -> list[Piece]:
        self.unread += text
        return []

    def close(self) -> list[Piece]:
        """A marker ends the section."""
        return []

    def finish(self) -> list[Piece]:
        """The output ends inside of it."""
        return []


class Trimmed(Section):
    """Reasoning or arguments: passed on without the white space around them."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._kind = kind
        self._space = ""
        self._began = False

    def feed(self, text: str) -> list[Piece]:
        if not self._began:
            text = text.lstrip()
        self._began = self._began or bool(text)
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return [Piece(self._kind, shown)] if shown else []

    def close(self) -> list[Piece]:
        self.ended = int(self._kind is Kind.ARGUMENTS)
        return []

    def finish(self) -> list[Piece]:
        return self.close()


class Text(Section):
    """What the assistant says. White space between it and another section is dropped."""

    def __init__(self, *, after_another: bool, plain: bool) -> None:
        super().__init__()
        self.fresh = True  # nothing said yet
        self._drop_leading = after_another
        self._plain = plain  # nothing can follow
        self.space = ""  # may be the end

    def feed(self, text: str) -> list[Piece]:
        if self._drop_leading:
            text = text.lstrip()
            self._drop_leading = not text
        text = self.space + text
        shown = text if self._plain else text.rstrip()
        self.space = text[len(shown) :]
        if not shown:
            return []
        self.fresh = False
        return [Piece(Kind.TEXT, shown)]

    def finish(self) -> list[Piece]:
        return [Piece(Kind.TEXT, self.space)]


class Name(Section):
    """A function's name."""

    def close(self) -> list[Piece]:
        return [Piece(Kind.CALL, self.unread.strip())]


class Calls(Section):
    """A row of calls. `unread` is what has not become a call so far."""

    def __init__(self, scanner: CallScanner) -> None:
        super().__init__()
        self._scanner = scanner

    @property
    def broken(self) -> bool:
        return self._scanner.broken

    def feed(self, text: str) -> list[Piece]:
        """Read until the scanner breaks; the rest is unread."""
        pieces: list[Piece] = []
        for at, character in enumerate(text):
            if self.broken:
                self.unread += text[at:]
                break
            calling = not self._scanner.between and not self.unread  # its name is known already
            found = self._scanner.feed(character)
            pieces += found
            self.unread = "" if found or calling else self.unread + character
        self.ended = self._scanner.ended
        return pieces

    def close(self) -> list[Piece]:
        self.ended += not self._scanner.between and not self.unread
        return []

    def finish(self) -> list[Piece]:
        return self.close()

    @property
    def after_calls(self) -> str:
        return self.unread.lstrip(BETWEEN)

    @property
    def lost(self) -> str:
        """A call that was begun and not understood."""
        return "" if self._scanner.between else self.unread


class Header(Section):
    """What stands before a GPT-OSS message: its channel, and whom it is for."""

    def mode(self) -> str:
        """Where the message goes."""
        if _RECIPIENT.search(self.unread):
            return "arguments"
        return "reasoning" if "analysis" in self.unread else "text"

    def close(self) -> list[Piece]:
        recipient = _RECIPIENT.search(self.unread)
        return [Piece(Kind.CALL, recipient[1])] if recipient else []
