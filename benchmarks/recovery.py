"""How long a deployment takes to serve again after one of its processes was killed.

    python -m benchmarks.recovery [--rounds 3] [--models tiny smollm2]

`reef serve` runs as a user would run it (executor `mp`, a trainer, one release trained and published) on the tiny
random model that `make crash` uses, and on SmolLM2. In every round each process gets SIGKILL once:

- engine: until a chat completion is answered again, under the committed release. A second of it is the supervisor's
  delay before the first replacement;
- trainer: until it is replaced and can train again, with the same delay. Meanwhile a chat completion must be answered;
- service, with whatever it started: until the service, started again at once, says 200 on /healthz, which it does only
  when the engines serve the committed release.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from crash.deployment import Deployment
from crash.model import make_model
from reef.demo.model import smollm2_directory
from reef.errors import ReefError

SECONDS = 120.0
POLL_SECONDS = 0.01
BODY = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def measure(model: Path, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Seconds by what was killed, one for each round."""
    found: dict[str, list[float]] = {"engine": [], "trainer": [], "service": []}
    flags = {"inference.model-path": model, "training.backend": "torch", "recipe.batch-size": 2}
    deployment = Deployment(directory, flags)
    deployment.start()
    try:
        deployment.wait_until_healthy(SECONDS)
        teach(deployment)
        for _ in range(rounds):
            found["engine"].append(kill_engine(deployment))
            found["trainer"].append(kill_trainer(deployment))
            found["service"].append(kill_service(deployment))
    finally:
        deployment.end()
    return found


def teach(deployment: Deployment) -> None:
    """Two answers, two scores, one release."""
    for score in (0.0, 1.0):
        answer = deployment.client.post("/v1/chat/completions", BODY)
        report = {"score": score, "references": [answer["reef"]["agent_record_id"]]}
        deployment.client.post("/reef/report", report)
    wait_until(lambda: deployment.client.get("/reef/status")["scenarios"][0]["head"]["number"] == 1)


def kill_engine(deployment: Deployment) -> float:
    began = kill(deployment, "engine")
    wait_until(lambda: answers(deployment))
    return time.monotonic() - began


def kill_trainer(deployment: Deployment) -> float:
    began = kill(deployment, "trainer")
    if not answers(deployment):
        raise SystemExit("a dead trainer must keep nobody from serving")
    wait_until(lambda: "the trainer was replaced" in deployment.log.read_text(errors="replace"))
    return time.monotonic() - began


def kill_service(deployment: Deployment) -> float:
    began = time.monotonic()
    deployment.kill()
    deployment.start()
    wait_until(lambda: deployment.healthy() is None)
    seconds = time.monotonic() - began
    if deployment.client.get("/reef/status")["scenarios"][0]["head"]["number"] != 1:
        raise SystemExit("the committed release is gone")
    return seconds


def kill(deployment: Deployment, component: str) -> float:
    pid = deployment.worker(component)
    assert pid is not None
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return began


def answers(deployment: Deployment) -> bool:
    try:
        deployment.client.post("/v1/chat/completions", BODY)
    except ReefError:
        return False
    return True


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {SECONDS:g} s")
        time.sleep(POLL_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=("tiny", "smollm2"), default=["tiny", "smollm2"])
    arguments = parser.parse_args()
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as scratch:
            model = make_model(Path(scratch) / "model") if name == "tiny" else smollm2_directory()
            load = os.getloadavg()[0]
            found = measure(model, arguments.rounds, Path(scratch) / "run")
        title = model.name if name == "smollm2" else "tiny model"
        print(f"{title}, {arguments.rounds} rounds, load average {load:.1f} to {os.getloadavg()[0]:.1f}")
        for victim, seconds in found.items():
            print(f"  {victim:<8} {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
