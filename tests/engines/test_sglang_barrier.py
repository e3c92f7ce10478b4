"""A pause barrier that fails in a real SGLang engine behind `reef serve`: at a publication, and at the next start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft", "openai")

from reef.runtime.interfaces import MarkerState  # noqa: E402
from reef.runtime.recovery import MarkerFile  # noqa: E402
from tests.engines.sglang import START_SECONDS  # noqa: E402
from tests.engines.test_sglang_deployment import SGLangReef  # noqa: E402

pytestmark = pytest.mark.timeout(9000)  # engines start four times, each in half a minute, on a busy machine in many

FAKE_FAULTS = Path(__file__).with_name("fake_faults")


class FaultyReef(SGLangReef):
    """A deployment whose engine has the plugin `fake_faults` besides Reef's own; each start of it is noted."""

    def __init__(self, model: Path, directory: Path, python: Path) -> None:
        self.faults = directory / "faults"
        self.faults.mkdir()
        wrapper = directory / "python"
        self._starts = directory / "starts"
        wrapper.write_text(
            f"#!/bin/sh\necho >> '{self._starts}'\n"
            f"PYTHONPATH='{FAKE_FAULTS}':$PYTHONPATH FAKE_FAULTS='{self.faults}' exec '{python}' \"$@\"\n"
        )
        wrapper.chmod(0o755)
        super().__init__(
            model,
            directory,
            **{"inference.python": wrapper, "inference.pause-mode": "retract", "training.mode": "lora"},
        )

    def starts(self) -> int:
        return len(self._starts.read_text())

    def state(self) -> MarkerState:
        marker = MarkerFile(self.directory / "data" / "marker.json").read()
        assert marker is not None
        return marker.state

    def troubles(self, done: Callable[[], bool]) -> list[tuple[str, MarkerState]]:
        """What the service said of its health until `done`, where it was not well, and the marker's state then."""
        found = []
        deadline = time.monotonic() + 2 * START_SECONDS
        while not done():
            assert time.monotonic() < deadline, found[-1:]
            answer = self.http.get("/healthz")
            if answer.is_error:
                found.append((answer.text, self.state()))
            time.sleep(0.05)
        return found


@pytest.fixture
def reef(engine_python, tiny_model, tmp_path) -> Iterator[FaultyReef]:
    made = FaultyReef(tiny_model, tmp_path, engine_python)
    with made.running():
        yield made


def test_a_barrier_that_fails_at_a_publication_and_at_the_start(reef: FaultyReef) -> None:
    reef.teach()
    engine = reef.scheduler()

    (reef.faults / "flush_cache").touch()
    reef.lesson()
    troubles = reef.troubles(lambda: reef.head()["number"] == 2)
    first, state = troubles[0]
    assert "the pause barrier failed: engine-0 refused POST /flush_cache" in first
    assert state is MarkerState.UPDATING_WEIGHTS
    assert all("recoverable" in reason for reason, _ in troubles), troubles
    assert reef.scheduler() != engine, "the engine was not replaced"
    assert reef.starts() == 2, "by the repair and by the retry"
    reef.ask()

    (reef.faults / "flush_cache").touch()
    reef.lesson()
    reef.troubles(lambda: reef.http.get("/healthz").is_error)
    assert reef.state() is MarkerState.UPDATING_WEIGHTS
    reef.server._process.kill()
    reef.server._process.wait()
    (reef.faults / "pause_generation").touch()
    reef.start()
    assert not (reef.faults / "pause_generation").exists()
    assert "the engines are replaced at once: engine-0 did not pause" in reef.server._text()
    troubles = reef.troubles(lambda: reef.head()["number"] == 3)
    assert all("recoverable" in reason for reason, _ in troubles), troubles
    reef.ask()
    assert [release["tokens"] > 0 for release in reef.verify()["releases"]] == [True] * 4
