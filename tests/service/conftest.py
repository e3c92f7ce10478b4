from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from blockbuster import blockbuster_ctx

from reef.config import resolve
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.service.app import GatewayServer, build
from reef.service.config import ServiceConfig
from tests.inference.chat.conftest import tokenizer  # noqa: F401
from tests.service.fakes import FakeDeployment


class Running:
    """A gateway on a free port, and ways to talk to it."""

    def __init__(self, server: GatewayServer, deployment: Any, thread: threading.Thread) -> None:
        self.server, self.deployment, self.thread = server, deployment, thread
        self.url = server.url
        self.http = httpx.Client(base_url=self.url, timeout=100)

    @cached_property
    def openai(self):
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=100)

    @property
    def engine(self):
        return self.deployment.engine

    def chat(self, *, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=body(**changes), headers=headers)

    def records(self, scenario: str = "default", **query: Any) -> list[dict[str, Any]]:
        response = self.http.get(f"/reef/scenarios/{scenario}/records", params={"detail": "full", **query})
        return response.json()["records"] if response.status_code == 200 else []

    def wait_for_records(self, count: int, scenario: str = "default") -> list[dict[str, Any]]:
        for _ in range(5000):
            if len(found := self.records(scenario)) >= count:
                return found
            threading.Event().wait(0.02)
        raise AssertionError(f"{len(found)} records after 100 s, not {count}")

    def scenarios(self) -> list[str]:
        return [found["scenario"] for found in self.http.get("/reef/scenarios").json()["scenarios"]]

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(100)
        assert not self.thread.is_alive()


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], **changes}


def events(text: str) -> list[Any]:
    """The JSON of every server-sent event; the last one must be [DONE] or an error."""
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in found]


@contextmanager
def running(deployment: Any, **settings: Any) -> Iterator[Running]:
    """Serve `deployment` on a thread until the block ends; blocking calls of ours on its loop raise."""
    config = ServiceConfig(port=0, **settings)
    server = GatewayServer(deployment, config)
    thread = threading.Thread(target=lambda: uvloop.run(server.run_deployment()), daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.01)
    assert server.started
    found = Running(server, deployment, thread)
    try:
        with blockbuster_ctx("reef"):
            yield found
    finally:
        found.stop()


def serving(data: Path, model: Path, **flags: str) -> AbstractContextManager[Running]:
    """Serve `model` with the local engine in this process, or with another `inference.backend`."""
    given = {
        "inference.model-path": str(model),
        **({} if "inference.backend" in flags else {"inference.threads": "1"}),
        "execution.executor": "uni",
        "reef.data-dir": str(data),
        **flags,
    }
    return running(build(resolve(file=None, environ={}, flags=given).config))


@pytest.fixture
def deployment(tokenizer: ChatTokenizer, tmp_path: Path) -> FakeDeployment:  # noqa: F811
    return FakeDeployment(tokenizer, tmp_path)


@pytest.fixture
def gateway(deployment) -> Iterator[Running]:
    with running(deployment) as found:
        yield found


@pytest.fixture
def serve(deployment) -> Callable:
    """A gateway with settings of your own: `with serve(tokens=[...]) as gateway`."""
    return lambda **settings: running(deployment, **settings)


@pytest.fixture
def run() -> Iterator[Callable]:
    with asyncio.Runner() as runner:
        yield lambda awaitable: runner.run(asyncio.wait_for(awaitable, 200))
