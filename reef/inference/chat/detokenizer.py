"""Token ids to visible text, as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from reef.inference.chat.tokenizer import ChatTokenizer


class TextStream:
    """The visible text of one output. What `push` and `finish` return, joined, does not depend on the chunking.

    Special tokens are not visible, but for those in `markers`, which are shown by their names. A character waits for
    its last byte; text that may turn out to begin a stop string waits until that is decided. `stopped_by` is the stop
    string that came first, once one is complete.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, stop: Sequence[str] = (), markers: frozenset[int] = frozenset()
    ) -> None:
        self.stopped_by: str | None = None
        self.shown = 0  # characters returned so far
        self._tokenizer = tokenizer
        self._stop = stop
        self._markers = markers
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._at_start = tokenizer.strips_leading_space

    @property
    def length(self) -> int:
        """Characters decoded so far, shown or held back."""
        return self.shown + len(self._held)

    def push(self, token_id: int) -> str:
        """Take one token; return the text that can be shown now."""
        if self.stopped_by is not None:
            return ""
        if token_id in self._markers:
            return self._mark(token_id)
        if token_id in self._tokenizer.special_ids:
            return ""
        piece = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if piece and self._at_start:
            self._at_start = False
            piece = piece.removeprefix(" ")
        return self._show(piece)

    def finish(self) -> str:
        """The output is over: return what was held back."""
        if self.stopped_by is not None:
            return ""
        text = self._show(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        self.shown += len(held)
        return text + held

    def _mark(self, token_id: int) -> str:
        """No character and no stop string goes across a marker."""
        text = self.finish()
        self._decoder.reset()
        if self.stopped_by is not None:
            return text
        name = self._tokenizer.token_bytes(token_id).decode()
        self.shown += len(name)
        return text + name

    def _show(self, piece: str) -> str:
        if not self._stop:
            self.shown += len(piece)
            return piece
        text = self._held + piece
        matches = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            _, end, self.stopped_by = min(matches)
            self._held = ""
        else:
            end = len(text) - longest_beginning(text, self._stop)
            self._held = text[end:]
        self.shown += end
        return text[:end]


def longest_beginning(text: str, stops: Iterable[str]) -> int:
    """Length of the longest end of `text` with which some of `stops` begins."""
    return max(
        (size for stop in stops for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])),
        default=0,
    )


def decode(tokenizer: ChatTokenizer, token_ids: Iterable[int], stop: Sequence[str] = ()) -> str:
    """Return the visible text of a whole output."""
    stream = TextStream(tokenizer, stop)
    return "".join([stream.push(token_id) for token_id in token_ids]) + stream.finish()
