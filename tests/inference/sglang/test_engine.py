"""An engine's process as its owner starts it; what it runs is the standard library's web server."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reef.errors import WorkerDied
from reef.inference.sglang import engine as module
from reef.inference.sglang.config import SGLangConfig
from reef.inference.sglang.engine import ManagedEngine
from reef.runtime.interfaces import PauseMode


class FakeEngine(ManagedEngine):
    """Serves a file that is named like SGLang's route, in place of a model."""

    def __init__(self, directory: Path) -> None:
        (directory / "model_info").touch()
        config = SGLangConfig(model_path="model", python=sys.executable)
        super().__init__("engine", config, {}, mode=PauseMode.IN_PLACE, lora=False, colocated=False, logs=directory)
        self._directory = directory
        self.shares: list[bool] = []

    def command(self, port: int, *, share: bool) -> list[str]:
        self.shares.append(share)
        where = ["--bind", "127.0.0.1", "--directory", str(self._directory)]
        return [sys.executable, "-m", "http.server", str(port), *where]


@pytest.fixture
def engine(tmp_path) -> Iterator[FakeEngine]:
    made = FakeEngine(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def taken(monkeypatch) -> Iterator[Callable[[int], None]]:
    """Let the next engines find a port that is taken by the time they listen."""
    real = module.free_port
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))

        def take(times: int) -> None:
            ports = iter([other.getsockname()[1]] * times)
            monkeypatch.setattr(module, "free_port", lambda: next(ports, None) or real())

        yield take


def test_an_engine_whose_port_was_taken_gets_another(engine, taken) -> None:
    taken(1)
    engine.start(share=True)
    engine.wait(100)
    assert engine.control.answers() and engine.death() is None and engine.shares == [True, True]


def test_it_does_not_try_for_ever(engine, taken) -> None:
    taken(2)
    engine.start(share=False)
    with pytest.raises(WorkerDied, match="Address already in use"):
        engine.wait(100)
    assert engine.shares == [False, False]


def test_an_engine_that_ends_for_another_reason_is_not_started_again(engine, monkeypatch) -> None:
    monkeypatch.setattr(engine, "command", lambda port, share: [sys.executable, "-c", "raise SystemExit('no memory')"])
    engine.start(share=True)
    process = engine._process
    with pytest.raises(WorkerDied, match="no memory"):
        engine.wait(100)
    assert engine._process is process
