"""A scripted token engine that injects what a real one does only by accident."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from reef.errors import ReefError
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.runtime.interfaces import Ending, GenerateRequest, InferenceHandler, TokenChunk


@dataclass
class Script:
    """What the engine does with each request."""

    text: str = "Hello there, friend."
    ids: list[int] | None = None  # instead of the text's, end token included if there is to be one
    chunk: int = 1  # tokens per chunk
    delay: float = 0.0  # seconds before each chunk
    gate: threading.Event | None = None  # it waits for this after three chunks
    cut_after: int | None = None  # tokens, then ENGINE_CUT
    die_after: int | None = None  # tokens, then an exception that is no ReefError
    stop_without_ending: bool = False
    refuse: ReefError | None = None
    load_ids: tuple[str, ...] = ("engine:0",)  # one per chunk, the last one repeats


@dataclass
class FakeEngine(InferenceHandler):
    tokenizer: ChatTokenizer
    script: Script = field(default_factory=Script)
    context: int = 2048
    end: int = 2  # the token that ends an answer
    seen: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: int = 0
    at_gate: int = 0  # how many have come there, so that all before it was taken
    script_of: Callable[[GenerateRequest], Script] | None = None
    on_request: Callable[[], None] = lambda: None

    @classmethod
    def from_config(cls, config, endpoints) -> FakeEngine:
        raise AssertionError("tests build it themselves")

    async def connect(self) -> None:
        pass

    async def close(self) -> None:
        pass

    @property
    def max_context(self) -> int:
        return self.context

    def expect(self, **changes) -> None:
        self.script = replace(Script(), **changes)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        script = self.script_of(request) if self.script_of else self.script
        self.seen.append(request)
        self.on_request()
        if script.refuse is not None:
            raise script.refuse
        self.running += 1
        ended = False
        try:
            ids = script.ids if script.ids is not None else [*self.tokenizer.encode_now(script.text), self.end]
            ids = ids[: request.sampling.max_tokens]
            ending = Ending.STOP if ids[-1] == self.end else Ending.LENGTH
            for number, start in enumerate(range(0, len(ids), script.chunk)):
                await asyncio.sleep(script.delay)
                if script.gate is not None and number == 3:
                    self.at_gate += 1
                    while not script.gate.is_set():
                        await asyncio.sleep(0.005)
                if script.cut_after is not None and start >= script.cut_after:
                    ended = True
                    yield self._chunk(request, [], script, number, Ending.ENGINE_CUT)
                    return
                if script.die_after is not None and start >= script.die_after:
                    raise RuntimeError("a bug in the engine client")
                part = ids[start : start + script.chunk]
                last = start + script.chunk >= len(ids) and not script.stop_without_ending
                ended = last
                yield self._chunk(request, part, script, number, ending if last else None)
        finally:
            self.running -= 1
            if not ended:
                self.aborted.append(request.request_id)

    def _chunk(self, request, ids, script, number, ending) -> TokenChunk:
        top = [[(token_id, -0.5), (17, -2.0)][: request.sampling.top_logprobs] for token_id in ids]
        return TokenChunk(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            sampled_logprobs=[-0.25] * len(ids),
            runtime_load_id=script.load_ids[min(number, len(script.load_ids) - 1)],
            top_logprobs=top if request.sampling.top_logprobs else [],
            ending=ending,
            cached_tokens=3,
            error="scripted failure" if ending is Ending.ENGINE_CUT else None,
        )
