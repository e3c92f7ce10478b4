"""What tests of a real SGLang engine share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from reef.inference.sglang.backend import SGLangBackend
from reef.inference.sglang.client import SGLangHandler
from reef.inference.sglang.config import SGLangConfig
from reef.runtime.interfaces import (
    BASE_LANE,
    EngineReport,
    GenerateRequest,
    Grammar,
    PauseMode,
    SamplingParams,
    WeightKind,
    WeightLoad,
)
from tests.inference.references import Answer

PREFIX = [1000 + number * 7 % 9000 for number in range(2000)]
"""A system prompt and tools of about the length that agents send."""

SECONDS = 240.0
START_SECONDS = 1800.0
"""For an engine to start: half a minute, on a busy machine many."""


def sglang_config(model: Path, **changes) -> SGLangConfig:
    settings = {"dtype": "float32", "device": "cpu", "start_timeout": START_SECONDS, **changes}
    return SGLangConfig(model_path=str(model), **settings)


@dataclass
class Served:
    """One running backend, and loads that are never named twice."""

    backend: SGLangBackend
    model: Path
    logs: Path

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)

    def fresh(self, path: Path | None, kind: WeightKind = WeightKind.FULL) -> WeightLoad:
        number = next(self._numbers)
        return WeightLoad(
            runtime_load_id=f"engine:{number}",
            content_id=f"content-{number}",
            kind=kind,
            path=None if path is None else str(path),
        )

    def publish(self, load: WeightLoad, mode: PauseMode, lane: str = BASE_LANE) -> EngineReport:
        """Stage, barrier, switch, resume; returns what the engine said behind the barrier."""
        self.backend.stage(load)
        self.backend.pause(mode)
        report = self.report()
        self.backend.activate(lane, load.runtime_load_id)
        self.backend.resume()
        return report

    def to_base(self) -> str:
        """Serve the base weights again, in every lane, under a load of their own."""
        report = self.report()
        load = self.fresh(None)
        for lane in report.lanes or [BASE_LANE]:
            self.publish(load, PauseMode.RETRACT, lane)
        for other in report.loads:
            if other not in (load.runtime_load_id, "engine:0"):
                self.backend.drop(other)
        return self.served()

    def served(self) -> str:
        return self.report().lanes.get(BASE_LANE, "engine:0")

    def report(self) -> EngineReport:
        return self.backend.reports()[0]

    def run(self, test: Callable[[SGLangHandler], Awaitable[None]], seconds: float = SECONDS) -> None:
        """Run `test` with a connected handler, for at most `seconds`."""

        async def whole() -> None:
            handler = SGLangHandler(self.backend.endpoints)
            await handler.connect()
            try:
                await test(handler)
            finally:
                await handler.close()

        asyncio.run(asyncio.wait_for(whole(), seconds))


@dataclass
class Asked:
    """One request and what has arrived for it; `answer` is complete when `task` is done."""

    answer: Answer
    prompt_ids: list[int]
    task: asyncio.Task[Answer] | None = None

    async def has(self, tokens: int) -> None:
        async with asyncio.timeout(SECONDS):
            while len(self.answer.token_ids) < tokens:
                assert self.task is not None and not self.task.done(), self.answer
                await asyncio.sleep(0.01)


_NUMBERS = itertools.count()


def start(
    handler: SGLangHandler, prompt_ids: Sequence[int], max_tokens: int = 8, *, lane: str = BASE_LANE,
    load: str | None = None, schema: str | None = None, **sampling,
) -> Asked:  # fmt: skip
    """Send a request, greedy and of exactly `max_tokens` tokens unless told otherwise, and read it in a task."""
    options = {"temperature": 0.0, "ignore_eos": schema is None, **sampling}
    if schema is not None:
        options["grammar"] = Grammar("json_schema", schema)
    request = GenerateRequest(
        request_id=f"request-{next(_NUMBERS)}",
        prompt_ids=list(prompt_ids),
        sampling=SamplingParams(max_tokens=max_tokens, **options),
        lane=lane,
        runtime_load_id=load,
    )
    asked = Asked(Answer(), request.prompt_ids)

    async def read() -> Answer:
        async for chunk in handler.generate(request):
            asked.answer.take(chunk)
        return asked.answer

    asked.task = asyncio.create_task(read())
    return asked


async def ask(handler: SGLangHandler, prompt_ids: Sequence[int], max_tokens: int = 8, **options) -> Answer:
    asked = start(handler, prompt_ids, max_tokens, **options)
    assert asked.task is not None
    return await asked.task


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a blocking condition holds."""
    async with asyncio.timeout(SECONDS):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


@cache
def _reference(model: Path, adapter: Path | None):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return found if adapter is None else PeftModel.from_pretrained(found, adapter)


def rescored(model: Path, prompt_ids: Sequence[int], output_ids: Sequence[int], adapter: Path | None = None):
    """Log-probabilities of `output_ids` by transformers. [num_output_tokens]"""
    import torch

    ids = torch.tensor([[*prompt_ids, *output_ids]])
    with torch.inference_mode():
        logits = _reference(model, adapter)(ids).logits[0, len(prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt_ids) :, None]).squeeze(1).tolist()


def assert_scores(answer: Answer, model: Path, prompt_ids: Sequence[int], adapter: Path | None = None) -> None:
    """What `reef verify` asks: the recorded log-probabilities are those of the weights that the spans name."""
    expected = rescored(model, prompt_ids, answer.token_ids, adapter)
    worst = max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True))
    assert worst < 1e-4, worst
