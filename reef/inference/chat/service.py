"""The one chat path: messages to token ids to an engine, and its chunks back to text with the exact tokens kept.

::

    messages ─render─► text ─tokenize─► prompt ids ─┬─► generate ─chunks─► Choice ─┐
                                                    └─► generate ─chunks─► Choice ─┴─► ChatStream: Delta, Delta, ...
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reef.errors import EngineError, InvalidRequest, ReefError
from reef.inference.chat.detokenizer import TextStream, decode
from reef.inference.chat.history import SampledTurns
from reef.inference.chat.messages import Message
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.runtime.interfaces import (
    BASE_LANE,
    Ending,
    GenerateRequest,
    Generation,
    InferenceHandler,
    SamplingParams,
    Span,
    TokenChunk,
)

log = logging.getLogger("reef.chat")


@dataclass(slots=True, kw_only=True)
class ChatRequest:
    """One conversation to continue `n` times. `max_tokens` None: as many as the context leaves."""

    request_id: str
    messages: Sequence[Message]
    sampling: SamplingParams
    max_tokens: int | None = None
    n: int = 1
    lane: str = BASE_LANE
    runtime_load_id: str | None = None
    logprobs: bool = False  # report those of visible tokens in the deltas


@dataclass(slots=True, frozen=True)
class TokenLogprob:
    """One visible output token, temperature 1; `top` is best first."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]]


@dataclass(slots=True)
class Delta:
    """New visible text of one choice. The choice's last delta has `ending`; `error` comes with ENGINE_CUT."""

    index: int
    text: str
    tokens: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None
    error: str | None = None


class Choice:
    """Accumulates one engine request into its exact Generation while it passes text on."""

    def __init__(
        self, index: int, tokenizer: ChatTokenizer, prompt_ids: list[int], sampling: SamplingParams, logprobs: bool
    ) -> None:
        self.index = index
        self.ending: Ending | None = None
        self.generation = Generation(
            prompt_ids=prompt_ids,
            output_ids=[],
            logprobs=[],
            sampled_logprobs=[],
            spans=[],
            ending=Ending.ENGINE_CUT,
            temperature=sampling.temperature,
        )
        self._tokenizer = tokenizer
        self._pieces: list[str] = []
        self._text = TextStream(tokenizer, sampling.stop)
        self._with_logprobs = logprobs
        self._unshown: deque[tuple[int, TokenLogprob]] = deque()  # with the character at which each token begins

    @property
    def text(self) -> str:
        """The visible text so far."""
        return "".join(self._pieces)

    def absorb(self, chunk: TokenChunk) -> Delta:
        """Take a chunk. A stop string that it completes ends the choice, whatever the engine made of it."""
        text = ""
        taken = 0
        for position, token_id in enumerate(chunk.token_ids):
            if self._with_logprobs:
                self._note(chunk, position, token_id)
            text += self._text.push(token_id)
            taken += 1
            if self._text.stopped_by is not None:
                break
        self._extend(chunk, taken)
        if self._text.stopped_by is not None:
            self.end(Ending.STOP)
        elif chunk.ending is not None:
            self.end(chunk.ending)
        if self.ending is not None:
            text += self._text.finish()
        self._pieces.append(text)
        return Delta(self.index, text, self._shown_tokens(), self.ending, chunk.error)

    def end(self, ending: Ending) -> None:
        """Fix the ending; the first one counts."""
        if self.ending is None:
            self.ending = self.generation.ending = ending

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

    def _note(self, chunk: TokenChunk, position: int, token_id: int) -> None:
        if token_id in self._tokenizer.special_ids:
            return
        token_bytes = self._tokenizer.token_bytes
        top = chunk.top_logprobs[position] if chunk.top_logprobs else []
        entry = TokenLogprob(
            token_bytes(token_id), chunk.logprobs[position], [(token_bytes(other), value) for other, value in top]
        )
        self._unshown.append((self._text.length, entry))

    def _shown_tokens(self) -> list[TokenLogprob]:
        shown = []
        while self._unshown and self._unshown[0][0] < self._text.shown:
            shown.append(self._unshown.popleft()[1])
        return shown


class ChatStream:
    """The choices of one request as they grow. Iterate over it for deltas; `close` it always.

    Each engine request is read by a task of its own, so that `abort` may be called from any other task while
    somebody waits for the next delta.
    """

    def __init__(
        self,
        handler: InferenceHandler,
        request: ChatRequest,
        prompt_text: str,
        choices: list[Choice],
        engine_requests: list[GenerateRequest],
    ) -> None:
        self.request = request
        self.prompt_text = prompt_text
        self.choices = choices
        self._started = False
        self._queue: asyncio.Queue[Delta | ReefError | None] = asyncio.Queue()
        self._open = len(choices)
        self._tasks = [
            asyncio.create_task(self._read(handler, engine_request, choice))
            for engine_request, choice in zip(engine_requests, choices, strict=True)
        ]

    @property
    def generations(self) -> list[Generation]:
        return [choice.generation for choice in self.choices]

    @property
    def began(self) -> bool:
        """True once any choice has a token."""
        return any(choice.generation.output_ids for choice in self.choices)

    @property
    def ending(self) -> Ending:
        """STOP or LENGTH if every choice is complete, else how the first incomplete one ended."""
        endings = [choice.generation.ending for choice in self.choices]
        return next((ending for ending in endings if not ending.complete), endings[0])

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> Delta:
        """Raises what the engine raised if that was before its first chunk."""
        if self._open == 0:
            raise StopAsyncIteration
        item = await self._queue.get()
        if item is None:
            self._open = 0
            raise StopAsyncIteration
        if isinstance(item, ReefError):
            raise item
        if item.ending is not None:
            self._open -= 1
        return item

    def abort(self, ending: Ending) -> None:
        """Stop every unfinished choice now, with this ending; the iteration ends. Never blocks."""
        for choice, task in zip(self.choices, self._tasks, strict=True):
            choice.end(ending)
            task.cancel()
        self._queue.put_nowait(None)

    async def close(self) -> None:
        """Return when the engine has let go of every request."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, handler: InferenceHandler, request: GenerateRequest, choice: Choice) -> None:
        error = "the engine ended the stream without saying how"
        try:
            chunks = handler.generate(request)
            try:
                async for chunk in chunks:
                    self._started = True
                    self._queue.put_nowait(choice.absorb(chunk))
                    if choice.ending is not None:
                        return
            finally:
                if (close := getattr(chunks, "aclose", None)) is not None:
                    await close()
        except ReefError as failure:
            if not self._started:
                self._queue.put_nowait(failure)
                return
            error = str(failure)
        except Exception as failure:
            log.exception("reading request %s failed", request.request_id)
            error = f"{type(failure).__name__}: {failure}"
        choice.end(Ending.ENGINE_CUT)
        self._queue.put_nowait(Delta(choice.index, "", [], Ending.ENGINE_CUT, error))


class ChatService:
    """Conversations in, streams of text with exact generations out, on any token engine."""

    def __init__(self, tokenizer: ChatTokenizer, handler: InferenceHandler) -> None:
        self.tokenizer = tokenizer
        self._handler = handler
        self._sampled = SampledTurns()

    async def prompt_ids(self, messages: Sequence[Message], lane: str = BASE_LANE) -> list[int]:
        """Token ids of the conversation up to the assistant's turn; turns sampled here keep their own ids."""
        return await self._tokenize(lane, messages, self.tokenizer.render(messages))

    def decode(self, generation: Generation, stop: Sequence[str] = ()) -> str:
        """The visible text of a finished generation."""
        return decode(self.tokenizer, generation.output_ids, stop)

    async def start(self, request: ChatRequest) -> ChatStream:
        """Begin to generate. Raises InvalidRequest for what cannot fit or is outside of the vocabulary."""
        text = self.tokenizer.render(request.messages)
        prompt_ids = await self._tokenize(request.lane, request.messages, text)
        sampling = replace(request.sampling, max_tokens=self._budget(len(prompt_ids), request.max_tokens))
        for token_id in sampling.logit_bias:
            if not 0 <= token_id < self.tokenizer.vocab_size:
                raise InvalidRequest(
                    f"token ids must be in [0, {self.tokenizer.vocab_size}), got {token_id}", "logit_bias"
                )
        choices = [Choice(index, self.tokenizer, prompt_ids, sampling, request.logprobs) for index in range(request.n)]
        engine_requests = [self._engine_request(request, prompt_ids, sampling, index) for index in range(request.n)]
        return ChatStream(self._handler, request, text, choices, engine_requests)

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams, *, runtime_load_id: str | None = None
    ) -> str:
        """Ask once, unrecorded; return the visible text. Raises EngineError if the answer was cut short."""
        request = ChatRequest(
            request_id=f"ask_{uuid.uuid4().hex}",
            messages=[Message(**message) for message in messages],
            sampling=sampling,
            max_tokens=sampling.max_tokens,
            runtime_load_id=runtime_load_id,
        )
        stream = await self.start(request)
        try:
            async for delta in stream:
                if delta.ending is Ending.ENGINE_CUT:
                    raise EngineError(delta.error or "the engine cut the answer short")
        finally:
            await stream.close()
        return stream.choices[0].text

    def remember(self, stream: ChatStream) -> None:
        """Keep the ids of complete answers for the turn after them."""
        token_bytes = self.tokenizer.token_bytes
        for choice in stream.choices:
            generation = choice.generation
            if generation.ending.complete:
                raw = b"".join(map(token_bytes, generation.output_ids)).decode(errors="replace")
                ids = [*generation.prompt_ids, *generation.output_ids]
                request = stream.request
                self._sampled.remember(request.lane, request.messages, choice.text, stream.prompt_text + raw, ids)

    async def _tokenize(self, lane: str, messages: Sequence[Message], text: str) -> list[int]:
        known, length = self._sampled.longest_prefix(lane, messages, text)
        return known + await self.tokenizer.encode(text[length:])

    def _budget(self, prompt: int, max_tokens: int | None) -> int:
        room = self._handler.max_context - prompt
        if room < 1:
            raise InvalidRequest(
                f"the conversation has {prompt} tokens; the context of {self._handler.max_context} leaves no room",
                "messages",
            )
        if max_tokens is None:
            return room
        if max_tokens > room:
            raise InvalidRequest(
                f"must be <= {room} with a prompt of {prompt} tokens and a context of "
                f"{self._handler.max_context}, got {max_tokens}",
                "max_tokens",
            )
        return max_tokens

    def _engine_request(
        self, request: ChatRequest, prompt_ids: list[int], sampling: SamplingParams, index: int
    ) -> GenerateRequest:
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + index) % 2**63)
        return GenerateRequest(
            request_id=request.request_id if request.n == 1 else f"{request.request_id}-{index}",
            prompt_ids=prompt_ids,
            sampling=sampling,
            lane=request.lane,
            runtime_load_id=request.runtime_load_id,
        )
