"""What tests of running engines share: a configuration, requests, readers, and other weights for the tiny model."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from reef.inference.local.config import LocalConfig
from reef.runtime.interfaces import (
    BASE_LANE,
    EngineReport,
    GenerateRequest,
    InferenceHandler,
    SamplingParams,
    TokenChunk,
)


def tiny_config(model: Path, **changes) -> LocalConfig:
    settings = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_tokens": 16384, "max_running": 64}
    settings["grammar_timeout"] = 200.0  # on a busy machine, too
    return LocalConfig(model_path=str(model), **{**settings, **changes})


def other_weights(model: Path, target: Path, seed: int = 1) -> Path:
    """A directory with the model's weights, disturbed."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target)
    torch.manual_seed(seed)
    tensors = load_file(target / "model.safetensors")
    save_file(
        {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in tensors.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    return target


def ask(number: int = 0, *, max_tokens: int = 8, lane: str = BASE_LANE, **sampling) -> GenerateRequest:
    """A greedy request of exactly `max_tokens` tokens whose prompt depends on `number`."""
    return GenerateRequest(
        request_id=f"request-{number}",
        prompt_ids=[100 + number, *range(200, 210)],
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **sampling),
        lane=lane,
    )


@dataclass
class Reader:
    """Collects one stream."""

    chunks: list[TokenChunk] = field(default_factory=list)

    async def read(self, handler: InferenceHandler, request: GenerateRequest) -> Reader:
        async for chunk in handler.generate(request):
            self.chunks.append(chunk)
        return self

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def loads(self) -> list[str]:
        """Runtime load ids in the order in which they produced tokens, each run once."""
        found: list[str] = []
        for chunk in self.chunks:
            if chunk.token_ids and (not found or found[-1] != chunk.runtime_load_id):
                found.append(chunk.runtime_load_id)
        return found

    async def has(self, tokens: int) -> None:
        """Wait until that many tokens have arrived."""
        async with asyncio.timeout(200):
            while len(self.tokens) < tokens:
                await asyncio.sleep(0.002)


class Brake:
    """Engines of this process generate so many more tokens and then wait, however late a test gets to run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, report: Callable[[], EngineReport]) -> None:
        """`report` asks the engine, which wakes it, too."""
        from reef.inference.local.engine import LocalEngine

        self._report, self._limit = report, math.inf
        has_work, iterate = LocalEngine.has_work, LocalEngine._iterate

        def free(engine: LocalEngine) -> bool:
            return engine._stats["output_tokens"] < self._limit

        def busy(engine: LocalEngine) -> bool:  # with what is no generation it goes on
            return bool(engine._notices or engine._grammars.finished) or (has_work(engine) and free(engine))

        monkeypatch.setattr(LocalEngine, "has_work", busy)
        monkeypatch.setattr(LocalEngine, "_iterate", lambda engine: iterate(engine) if free(engine) else [])

    def hold(self, tokens: int) -> None:
        self._limit = self._report().stats["output_tokens"] + tokens
        self._report()

    def lift(self) -> None:
        self._limit = math.inf
        self._report()


async def control(function, *args):
    """A control call, from a thread: it blocks."""
    return await asyncio.to_thread(function, *args)


def run(coroutine, seconds: float = 250.0):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))
