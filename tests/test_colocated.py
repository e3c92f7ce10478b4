"""Engine and trainer on shared memory, as a user runs them: learning while clients stream, and dying at a hand-over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft", "openai")

from crash.kills import Kill, Kind  # noqa: E402
from crash.model import make_model  # noqa: E402
from crash.run import Run  # noqa: E402
from reef.points import Point  # noqa: E402
from tests.test_end_to_end import PROMPT, Reef, worst_difference  # noqa: E402

WEIGHT_BYTES = 49152 * 64 * 4  # of the tiny model's embedding alone
COLOCATED = {"training.colocate": "true"}


class Watch:
    """Looks at the processes from outside, over and over: resident bytes, and what healthz says."""

    def __init__(self, reef: Reef) -> None:
        self._reef = reef
        self._workers = {"engine" if b"engine-0" in line else "trainer": pid for pid, line in reef.children().items()}
        self.resident: dict[str, list[int]] = {name: [] for name in self._workers}
        self.health: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        for name, pid in self._workers.items():
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            self.resident[name].append(pages * 4096)

    def _run(self) -> None:
        with httpx.Client(base_url=self._reef.server.url, timeout=200) as http:
            while not self._over.wait(0.01):
                self._look()
                if len(self.resident["engine"]) % 20 == 0:
                    self.health.add(http.get("/healthz").status_code)


@pytest.fixture
def reef(tiny_model: Path, tmp_path: Path) -> Iterator[Reef]:
    """With adapters; the deaths below are with full weights."""
    made = Reef(tiny_model, tmp_path, **{"training.mode": "lora", **COLOCATED})
    with made.running():
        yield made


def test_learning_on_shared_memory_while_clients_stream(reef: Reef):
    reef.ask(seed=100)
    streams = []

    def begin() -> None:  # after it, a few reports start the step, for which the engine stops at once
        stream = reef.openai.chat.completions.create(
            model="any", messages=PROMPT, max_tokens=3500, stream=True, extra_body={"ignore_eos": True}, seed=1
        )
        streams.append(iter(stream))
        next(streams[0])

    with Watch(reef) as watch:
        reef.teach(begin)
        waiting, reading = reef.ask(seed=200)[0], list(streams[0])
    assert waiting and reading

    memory = reef.status()["memory"]
    engine, trainer = memory["engines release"][0], memory["trainer release"][0]
    assert (engine["owner"], set(engine["released"])) == ("engine-0", {"weights", "kv_cache"})
    assert (trainer["owner"], set(trainer["released"])) == ("trainer", {"weights", "optimizer"})
    assert memory["engines restore"][0]["released"] == memory["trainer restore"][0]["released"] == []
    for one in (engine, trainer):
        assert one["bytes_before"] - one["bytes_after"] > WEIGHT_BYTES / 2, memory
    # What comes back is touched bit by bit, so only the way down shows at once.
    seen = watch.resident["engine"]
    assert seen[0] - min(seen) > WEIGHT_BYTES / 2, "from outside: before and during"
    assert max(watch.resident["trainer"]) - watch.resident["trainer"][0] > WEIGHT_BYTES / 2
    assert watch.health == {200}, "a step is no trouble: requests wait"

    crossing = next(r for r in reef.records() if len(r["generations"][0]["output_ids"]) == 3500)
    spans = crossing["generations"][0]["spans"]
    assert [span["runtime_load_id"] for span in spans] == ["engine:0", reef.head()["runtime_load_id"]]
    reef.teach()
    worst, loads = worst_difference(reef)
    assert worst < 1e-4 and loads >= {"engine:0", "engine:1"}, "rescored under the weights that the spans name"


def test_every_death_at_a_hand_over_ends_with_the_committed_release_serving(tmp_path):
    flags = {"training.mode": "full", "inference.pause-mode": "retract", "inference.health-timeout": 60}
    kind = Kind("colocated", {**flags, **COLOCATED})
    kills = (
        Kill(Point.TRAINER_STEP, "before", "engine"),  # its memory is the trainer's
        Kill(Point.GIVE_BACK_DEVICE, "before", "trainer"),
        Kill(Point.MEMORY_RESTORE, "before", "service"),
        Kill(Point.ENGINE_RESTORE_MEMORY, "after", "engine"),
    )
    with Run(kind, make_model(tmp_path / "model"), tmp_path / "run") as run:
        problems = [problem for kill in kills for problem in run.kill(kill).problems]
        run.conclude()
    assert "\n".join(problems) == ""
    assert "\n".join(run.audit.findings.everything()) == ""
    assert all(outcome.seconds is not None for outcome in run.session.outcomes) and run.audit.releases > 1
