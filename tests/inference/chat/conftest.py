from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from reef.inference.chat.service import ChatService
from reef.inference.chat.tokenizer import ChatTokenizer
from tests.inference.chat.engines import FakeEngine


@pytest.fixture(scope="session")
def tokenizer(smollm2) -> ChatTokenizer:
    return ChatTokenizer.load(smollm2)


@pytest.fixture
def engine(tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


@pytest.fixture
def chat(tokenizer, engine) -> ChatService:
    return ChatService(tokenizer, engine)


@pytest.fixture
def run() -> Iterator[Callable]:
    """Run a coroutine, at most 200 seconds."""
    with asyncio.Runner() as runner:
        yield lambda awaitable: runner.run(asyncio.wait_for(awaitable, 200))
