"""Coordinators outside the service, on real engines and trainers: found, killed, replaced; nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft", "openai")

from reef.demo.server import Server  # noqa: E402
from reef.runtime.executor.process import identify, lives  # noqa: E402
from reef.runtime.remote import read_discovery  # noqa: E402
from tests.test_end_to_end import Reef, worst_difference  # noqa: E402

SECONDS = 200.0


def until(condition, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def healthy(reef: Reef) -> bool:
    return reef.http.get("/healthz").status_code == 200


class Coordinator:
    """`reef coordinator` beside a service."""

    def __init__(self, reef: Reef) -> None:
        self._reef = reef
        self._runs = 0
        self._path = reef.directory / "data" / "coordinator.json"

    def start(self) -> None:
        self._runs += 1
        keys = ("inference", "training", "recipe", "reef.data-dir")
        arguments = [f"--{key}={value}" for key, value in self._reef.flags.items() if key.startswith(keys)]
        self._server = Server(arguments, self._reef.directory / f"coordinator-{self._runs}.log", command="coordinator")
        self._server.start()

    def kill(self) -> None:
        pid = read_discovery(self._path).pid
        os.kill(pid, signal.SIGKILL)
        self._server.stop()

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def reef(tiny_model: Path, tmp_path: Path) -> Iterator[Reef]:
    made = Reef(tiny_model, tmp_path, **{"execution.runtime": "coordinator_training"})
    yield made
    made.server.stop()


def test_a_service_and_its_coordinator_die_in_turn(reef):
    coordinator = Coordinator(reef)
    coordinator.start()
    try:
        until(
            lambda: (reef.directory / "data" / "coordinator.json").exists(), "the coordinator does not say where it is"
        )
        reef.start()
        reef.teach()
        _, answer = reef.ask(temperature=0.0)

        coordinator.kill()
        until(lambda: not healthy(reef), "a dead coordinator is not noticed")
        refused = reef.http.post("/v1/chat/completions", json={"model": "any", "messages": [], "max_tokens": 1})
        assert refused.status_code in (400, 503)
        coordinator.start()
        until(lambda: healthy(reef), "the replacement is not followed")
        assert reef.ask(temperature=0.0)[1] == answer, "the replacement does not serve the head"
        reef.teach()
        _, answer = reef.ask(temperature=0.0)

        reef.server.stop()  # the coordinator goes on, and its engines keep what they hold
        reef.start()
        assert reef.ask(temperature=0.0)[1] == answer
        worst, loads = worst_difference(reef)
        assert worst < 1e-4 and len(loads) == 3
    finally:
        coordinator.stop()


def test_a_coordinator_in_a_process_of_its_own_is_replaced(tiny_model, tmp_path):
    reef = Reef(tiny_model, tmp_path, **{"execution.runtime": "executor_training"})
    reef.start()
    try:
        reef.teach()
        _, answer = reef.ask(temperature=0.0)
        children = reef.children()
        assert len(children) == 1, "the service owns the coordinator, and that one the rest"
        coordinator = next(iter(children))
        below = [identify(pid) for pid in _children(coordinator)]
        assert len(below) == 2
        os.kill(coordinator, signal.SIGKILL)
        until(lambda: not healthy(reef), "a dead coordinator is not noticed")
        until(lambda: not any(one and lives(one) for one in below), "a worker outlived its coordinator")
        until(lambda: healthy(reef), "it is not replaced")
        assert reef.ask(temperature=0.0)[1] == answer
        reef.teach()
        worst, loads = worst_difference(reef)
        assert worst < 1e-4 and len(loads) >= 2
    finally:
        reef.server.stop()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
