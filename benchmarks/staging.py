"""What requests in flight notice of an adapter being staged and proven beside them, on the real model.

    python -m benchmarks.staging [--model DIR] [--requests 16] [--rounds 5]

One engine decodes all the time. In turns, an adapter of rank 16 is staged and the probe of a publication scored under
it and under the incumbent: in slices between the steps, as the engine does it, and (the rival) each as a whole between
two steps. Of each round: the longest time from the end of a step to the end of the next one while that went on, and in
the next second without it. Processor time of the engine's process is given as well: it means something on a busy
machine, and it counts both threads of two.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reef.inference.local.worker as worker_module
from reef.demo.model import smollm2_directory
from reef.inference.local.config import LocalConfig
from reef.inference.local.engine import LocalEngine
from reef.inference.local.worker import EngineWorker
from reef.runtime.interfaces import GenerateRequest, PauseMode, SamplingParams, TokenChunk, WeightKind, WeightLoad
from reef.runtime.publication import probe_ids

LANE = "stories"
SHARES = {"whole": 1e9, "slices": worker_module._CHORE_SHARE}

ends: list[tuple[float, float]] = []
"""When each step ended: seconds on the clock, and of processor time."""


class TimedEngine(LocalEngine):
    def step(self) -> list[TokenChunk]:
        chunks = super().step()
        ends.append((time.monotonic(), time.process_time()))
        return chunks


def make_adapter(model: Path, target: Path) -> Path:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config: Any = LoraConfig(
        task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False
    )
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    get_peft_model(base, config).save_pretrained(str(target))
    return target


def longest(steps: Sequence[tuple[float, float]], clock: int) -> float:
    return max(after[clock] - before[clock] for before, after in itertools.pairwise(steps))


def measure(model: Path, directory: Path, requests: int, rounds: int) -> dict[str, list[list[float]]]:
    """Per way and round: longest on the clock with and without, then the same in processor time (seconds)."""
    adapter = str(make_adapter(model, directory / "adapter"))
    worker_module.LocalEngine = TimedEngine  # type: ignore[misc]
    config = LocalConfig(model_path=str(model))
    worker = EngineWorker(config=config, name="engine-0", listen=str(directory / "engine-0"))

    def load(number: int) -> WeightLoad:
        return WeightLoad(
            runtime_load_id=f"engine:{number}", content_id=f"c{number}", kind=WeightKind.LORA, path=adapter
        )

    worker.stage(load(1))
    worker.pause(PauseMode.IN_PLACE)
    worker.activate(LANE, "engine:1")
    worker.resume()
    for number in range(requests):
        sampling = SamplingParams(max_tokens=1900, ignore_eos=True, seed=number)
        request = GenerateRequest(
            request_id=f"r{number}", prompt_ids=[*range(100 + number, 140)], sampling=sampling, lane=LANE
        )
        worker._steps.call(lambda engine, request=request: engine.add(request))
    probe = probe_ids(worker._steps.call(lambda engine: engine.vocab_size))
    found: dict[str, list[list[float]]] = {way: [] for way in SHARES}
    time.sleep(2)
    for number, way in enumerate([*SHARES] * rounds, start=2):
        worker_module._CHORE_SHARE = SHARES[way]
        start = len(ends)
        worker.stage(load(number))
        for runtime_load_id in (f"engine:{number}", "engine:1"):
            worker.score(runtime_load_id, probe)
        time.sleep(0.2)
        middle = len(ends)
        worker.drop(f"engine:{number}")
        time.sleep(1)
        parts = (ends[start:middle], ends[middle:])
        found[way].append([longest(part, clock) for clock in (0, 1) for part in parts])
    worker.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = arguments.model or smollm2_directory()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(model, Path(directory), arguments.requests, arguments.rounds)
    print(f"{model.name}, {arguments.requests} requests in flight, load average {os.getloadavg()[0]:.1f}")
    for way, values in found.items():
        for name, with_it, without in (("clock", 0, 1), ("processor", 2, 3)):
            shown = [
                f"{statistics.median(column) * 1e3:.0f} ms ({min(column) * 1e3:.0f} to {max(column) * 1e3:.0f})"
                for column in ([round_[with_it] for round_ in values], [round_[without] for round_ in values])
            ]
            print(f"  {way:<6} longest gap, {name:<9} {shown[0]} while staging and scoring, {shown[1]} without")


if __name__ == "__main__":
    main()
