"""One answer as it grows: its exact tokens, and what a client sees of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from reef.inference.chat.detokenizer import TextStream
from reef.inference.chat.parser import OutputParser
from reef.inference.chat.pieces import Answer, Kind, Piece
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.runtime.interfaces import Ending, Generation, Span, TokenChunk


@dataclass(slots=True, frozen=True)
class TokenLogprob:
    """One visible output token, temperature 1; `top` is best first."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]]


@dataclass(slots=True)
class Delta:
    """What is new of one choice. The choice's last delta has `ending`; `error` comes with ENGINE_CUT."""

    index: int
    pieces: list[Piece] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind is Kind.TEXT)


@dataclass(slots=True, frozen=True)
class ChoiceOptions:
    """How a choice is read."""

    stop: list[str]
    temperature: float = 1.0
    markers: frozenset[int] = frozenset()  # special tokens that the parser knows
    lead: str = ""  # stands before the output and is read with it
    single_call: bool = False  # the answer ends with its first tool call
    logprobs: bool = False


class Choice:
    """Accumulates one engine request into its exact Generation while it passes on what it reads."""

    def __init__(
        self,
        index: int,
        tokenizer: ChatTokenizer,
        prompt_ids: list[int],
        parser: OutputParser,
        answer: Answer,
        options: ChoiceOptions,
    ) -> None:
        self.index = index
        self.answer = answer
        self.ending: Ending | None = None
        self.stopped_by: str | None = None  # the stop string that ended it
        self.reasoning_tokens = 0
        self.generation = Generation(
            prompt_ids=prompt_ids,
            output_ids=[],
            logprobs=[],
            sampled_logprobs=[],
            spans=[],
            ending=Ending.ENGINE_CUT,
            temperature=options.temperature,
        )
        self._tokenizer = tokenizer
        self._parser = parser
        self._options = options
        self._text = TextStream(tokenizer, options.stop, options.markers)
        self._pending = parser.push(options.lead)
        self._unshown: deque[tuple[int, TokenLogprob]] = deque()  # with the character at which each token begins

    @property
    def text(self) -> str:
        """The visible text so far, without reasoning and tool calls."""
        return self.answer.text

    def absorb(self, chunk: TokenChunk) -> Delta:
        """Take a chunk. What ends the choice here ends it, whatever the engine made of it."""
        pieces, self._pending = self._pending, []
        taken = 0
        for position, token_id in enumerate(chunk.token_ids):
            self._read(chunk, position, token_id, pieces)
            taken += 1
            if self._over():
                break
        self._extend(chunk, taken)
        if self._over():
            self.end(Ending.STOP)
        elif chunk.ending is not None:
            self.end(chunk.ending)
            self.stopped_by = chunk.stopped_by
        if self.ending is not None:
            pieces += self._parser.push(self._text.finish())
            pieces += self._parser.finish()
        self.answer.add(pieces)
        return Delta(self.index, pieces, self._shown_tokens(), self.ending, chunk.error)

    def end(self, ending: Ending) -> None:
        """Fix the ending; the first one counts."""
        if self.ending is None:
            self.ending = self.generation.ending = ending

    def _over(self) -> bool:
        self.stopped_by = self._text.stopped_by
        return self.stopped_by is not None or (self._options.single_call and self._parser.calls_ended > 0)

    def _read(self, chunk: TokenChunk, position: int, token_id: int, pieces: list[Piece]) -> None:
        parser = self._parser
        began, in_text = self._text.length, parser.in_text
        self.reasoning_tokens += parser.in_reasoning
        text = self._text.push(token_id)
        if text:
            pieces += parser.push(text)
        if self._options.logprobs and in_text and parser.in_text and token_id not in self._tokenizer.special_ids:
            self._unshown.append((began, self._logprob(chunk, position, token_id)))

    def _extend(self, chunk: TokenChunk, taken: int) -> None:
        generation = self.generation
        start = len(generation.output_ids)
        generation.output_ids += chunk.token_ids[:taken]
        generation.logprobs += chunk.logprobs[:taken]
        generation.sampled_logprobs += chunk.sampled_logprobs[:taken]
        generation.cached_tokens = max(generation.cached_tokens, chunk.cached_tokens)
        if taken == 0:
            return
        spans = generation.spans
        if spans and spans[-1].runtime_load_id == chunk.runtime_load_id:
            start = spans.pop().start
        spans.append(Span(start, len(generation.output_ids), chunk.runtime_load_id))

    def _logprob(self, chunk: TokenChunk, position: int, token_id: int) -> TokenLogprob:
        token_bytes = self._tokenizer.token_bytes
        top = chunk.top_logprobs[position] if chunk.top_logprobs else []
        return TokenLogprob(
            token_bytes(token_id), chunk.logprobs[position], [(token_bytes(other), value) for other, value in top]
        )

    def _shown_tokens(self) -> list[TokenLogprob]:
        shown = []
        while self._unshown and self._unshown[0][0] < self._text.shown:
            shown.append(self._unshown.popleft()[1])
        return shown


def read_generation(
    tokenizer: ChatTokenizer, generation: Generation, parser: OutputParser, answer: Answer, options: ChoiceOptions
) -> Answer:
    """Read a finished generation as it was read when it was sampled."""
    text = TextStream(tokenizer, options.stop, options.markers)
    answer.add(parser.push(options.lead))
    for token_id in generation.output_ids:
        answer.add(parser.push(text.push(token_id)))
        if options.single_call and parser.calls_ended:
            break
    answer.add(parser.push(text.finish()))
    answer.add(parser.finish())
    return answer
