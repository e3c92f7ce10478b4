"""The one chat path: messages to token ids to an engine, and its chunks back to text with the exact tokens kept.

::

    messages ─render─► text ─tokenize─► prompt ids ─┬─► generate ─chunks─► Choice ─┐
                                                    └─► generate ─chunks─► Choice ─┴─► ChatStream: Delta, Delta, ...
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reef.errors import EngineError, InvalidRequest, ReefError
from reef.inference.chat.choice import Choice, ChoiceOptions, Delta, read_generation
from reef.inference.chat.formats import PLAIN, Table
from reef.inference.chat.history import SampledTurns
from reef.inference.chat.messages import Conversation, Message
from reef.inference.chat.parser import OutputParser
from reef.inference.chat.pieces import Answer
from reef.inference.chat.prompt import Prompt, PromptBuilder
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.runtime.interfaces import (
    BASE_LANE,
    Ending,
    GenerateRequest,
    Generation,
    InferenceHandler,
    SamplingParams,
)
from reef.tracing import span

log = logging.getLogger("reef.chat")


@dataclass(slots=True, kw_only=True)
class ChatRequest:
    """One conversation to continue `n` times, or (without one) each of `prompts`, texts or token ids as they are.

    `max_tokens` None: as many as the context leaves. Tool calls of choice i have ids that begin with `call_ids` and i.
    """

    request_id: str
    conversation: Conversation | None = None
    prompts: Sequence[str | Sequence[int]] = ()
    sampling: SamplingParams
    max_tokens: int | None = None
    n: int = 1
    lane: str = BASE_LANE
    runtime_load_id: str | None = None
    logprobs: bool = False  # report those of visible tokens in the deltas
    call_ids: str = "call_"


class ChatStream:
    """The choices of one request as they grow. Iterate over it for deltas; `close` it always.

    Each engine request is read by a task of its own, so that `abort` may be called from any other task while
    somebody waits for the next delta.
    """

    def __init__(
        self,
        handler: InferenceHandler,
        prompt: Prompt,
        choices: list[Choice],
        engine_requests: list[GenerateRequest],
    ) -> None:
        self.prompt = prompt
        self.choices = choices
        self._started = False
        self._queue: asyncio.Queue[Delta | ReefError | None] = asyncio.Queue()
        self._open = len(choices)
        self._tasks = [
            asyncio.create_task(self._generate(handler, engine_request, choice))
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

    async def _generate(self, handler: InferenceHandler, request: GenerateRequest, choice: Choice) -> None:
        with span(
            "engine generation", engine_request=request.request_id, prompt_tokens=len(request.prompt_ids)
        ) as traced:
            try:
                await self._read(handler, request, choice)
            finally:
                if traced is not None:
                    generation = choice.generation
                    found = {"output_tokens": len(generation.output_ids), "cached_tokens": generation.cached_tokens}
                    traced.set_attributes({f"reef.{name}": number for name, number in found.items()})
                    traced.set_attribute("reef.ending", generation.ending)

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
        self._queue.put_nowait(Delta(choice.index, ending=Ending.ENGINE_CUT, error=error))


@dataclass(slots=True, frozen=True)
class _Reading:
    """How outputs are read: the parser's table, and the special tokens that mean something in it."""

    table: Table
    markers: frozenset[int]


_AS_TEXT = _Reading(PLAIN, frozenset())


class ChatService:
    """Conversations in, streams of what is said with exact generations out, on any token engine."""

    def __init__(self, tokenizer: ChatTokenizer, handler: InferenceHandler) -> None:
        self.tokenizer = tokenizer
        self._handler = handler
        self._sampled = SampledTurns()
        self._prompts = PromptBuilder(tokenizer, self._sampled)
        tables = [tokenizer.format.table(with_tools=with_tools) for with_tools in (False, True)]
        self._readings = [_Reading(table, _special_ids(tokenizer, table)) for table in tables]

    async def prompt_ids(self, conversation: Conversation, lane: str = BASE_LANE) -> list[int]:
        """Token ids of the conversation up to the assistant's turn; turns sampled here keep their own ids."""
        return (await self._prompts.build(lane, conversation)).ids

    async def start(self, request: ChatRequest) -> ChatStream:
        """Begin to generate. Raises InvalidRequest for what cannot fit or is outside of the vocabulary."""
        for token_id in request.sampling.logit_bias:
            self._check_id(token_id, "logit_bias")
        if request.conversation is not None:
            prompts = [await self._prompts.build(request.lane, request.conversation)]
        else:
            prompts = [await self._prompt_of(given) for given in request.prompts]
        choices: list[Choice] = []
        engine_requests: list[GenerateRequest] = []
        for prompt in prompts:
            sampling = self._sampling(request, prompt)
            for _ in range(request.n):
                choices.append(self._choice(request, prompt, len(choices)))
                engine_requests.append(_engine_request(request, prompt, sampling, len(engine_requests)))
        if len(choices) == 1:
            engine_requests[0].request_id = request.request_id
        return ChatStream(self._handler, prompts[0], choices, engine_requests)

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams, *, runtime_load_id: str | None = None
    ) -> str:
        """Ask once, unrecorded; return the visible text. Raises EngineError if the answer was cut short."""
        request = ChatRequest(
            request_id=f"ask_{uuid.uuid4().hex}",
            conversation=Conversation(messages=[Message(**message) for message in messages]),
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

    def remember(self, stream: ChatStream, receipt: str) -> None:
        """Keep the ids of complete answers for the turn after them."""
        for choice in stream.choices:
            self._remember(stream.prompt, stream.prompt.text, choice.answer, choice.generation, receipt)

    async def recall(self, request: ChatRequest, generations: Sequence[Generation], receipt: str) -> None:
        """Remember answers of another time: what was asked, and what came of it."""
        conversation = request.conversation
        if conversation is None:
            return
        prompt = await self._prompts.build(request.lane, conversation)
        for index, generation in enumerate(generations):
            answer = Answer(f"{request.call_ids}_{index}_")
            options = self._choice_options(conversation, prompt, request.sampling.stop, logprobs=False)
            read_generation(self.tokenizer, generation, self._parser(conversation, prompt), answer, options)
            self._remember(prompt, self._raw(generation.prompt_ids), answer, generation, receipt)

    # ------------------------------------------------------------------ inside

    def _remember(self, prompt: Prompt, text: str, answer: Answer, generation: Generation, receipt: str) -> None:
        if prompt.messages and generation.ending.complete:
            self._sampled.remember(
                prompt.lane,
                prompt.context,
                prompt.messages,
                answer.message(prompt.prefill),
                text + self._raw(generation.output_ids),
                [*generation.prompt_ids, *generation.output_ids],
                num_prompt=len(generation.prompt_ids),
                receipt=receipt,
            )

    def _raw(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self.tokenizer.text_of(token_ids)

    async def _prompt_of(self, given: str | Sequence[int]) -> Prompt:
        if isinstance(given, str):
            return Prompt(await self.tokenizer.encode(given, with_special=True), given)
        for token_id in given:
            self._check_id(token_id, "prompt")
        return Prompt(list(given), "")

    def _check_id(self, token_id: int, field: str) -> None:
        if not 0 <= token_id < self.tokenizer.vocab_size:
            raise InvalidRequest(f"token ids must be in [0, {self.tokenizer.vocab_size}), got {token_id}", field)

    def _choice(self, request: ChatRequest, prompt: Prompt, index: int) -> Choice:
        conversation = request.conversation
        sampling = request.sampling
        options = self._choice_options(conversation, prompt, sampling.stop, logprobs=request.logprobs)
        options = replace(options, temperature=sampling.temperature)
        parser = self._parser(conversation, prompt)
        return Choice(index, self.tokenizer, prompt.ids, parser, Answer(f"{request.call_ids}_{index}_"), options)

    def _choice_options(
        self, conversation: Conversation | None, prompt: Prompt, stop: list[str], *, logprobs: bool
    ) -> ChoiceOptions:
        return ChoiceOptions(
            stop=stop,
            markers=self._reading(conversation).markers,
            lead=prompt.lead,
            single_call=conversation is not None and not conversation.parallel_calls,
            logprobs=logprobs,
        )

    def _reading(self, conversation: Conversation | None) -> _Reading:
        if conversation is None:
            return _AS_TEXT
        return self._readings[bool(conversation.tools) and conversation.tool_choice != "none"]

    def _parser(self, conversation: Conversation | None, prompt: Prompt) -> OutputParser:
        tools = {tool.name: tool.parameters for tool in conversation.tools} if conversation is not None else {}
        start = "reasoning" if prompt.starts_reasoning else "text" if prompt.prefill else ""
        return OutputParser(self._reading(conversation).table, tools, start=start)

    def _sampling(self, request: ChatRequest, prompt: Prompt) -> SamplingParams:
        budget = self._budget(len(prompt.ids), request.max_tokens, "messages" if prompt.messages else "prompt")
        return replace(request.sampling, max_tokens=budget, grammar=prompt.grammar)

    def _budget(self, prompt: int, max_tokens: int | None, field: str) -> int:
        if prompt < 1:
            raise InvalidRequest("must have at least 1 token", field)
        room = self._handler.max_context - prompt
        if room < 1:
            raise InvalidRequest(
                f"the conversation has {prompt} tokens; the context of {self._handler.max_context} leaves no room",
                field,
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


def _special_ids(tokenizer: ChatTokenizer, table: Table) -> frozenset[int]:
    markers = {marker.encode() for marker in table.markers}
    return frozenset(token_id for token_id in tokenizer.special_ids if tokenizer.token_bytes(token_id) in markers)


def _engine_request(request: ChatRequest, prompt: Prompt, sampling: SamplingParams, index: int) -> GenerateRequest:
    if sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + index) % 2**63)
    return GenerateRequest(
        request_id=f"{request.request_id}-{index}",
        prompt_ids=prompt.ids,
        sampling=sampling,
        lane=request.lane,
        runtime_load_id=request.runtime_load_id,
    )
