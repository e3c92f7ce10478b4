"""Agents that share a long system prompt, while releases are published under them, on the local engine.

    python -m benchmarks.agents [--model DIR] [--scale 0.25] [--agents 8] [--turns 20] [--prefix 2000] [--every 5]

Every agent sends its next turn as soon as the one before is answered: the shared prefix, its conversation so far, and
a new message. After every `every` turns (of the average agent) a LoRA release is published under whatever is in flight.
Three ways to treat the prefix cache do the same work in one process, in turns, `--rounds` times:

    off          nothing is shared, requests in flight keep their KV
    retract      shared; a publication drops everything and computes what is in flight again
    versions     shared; entries are keyed by load, requests in flight keep their KV (the default)

`--scale` shortens prefix and messages. One engine is stepped by one thread; `off` is the rival. Where others use the
machine too, the ratio of processor time is the number that means something.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from reef.demo.model import smollm2_directory
from reef.inference.local.config import LocalConfig
from reef.inference.local.engine import LocalEngine
from reef.runtime.interfaces import GenerateRequest, PauseMode, SamplingParams, TokenChunk, WeightKind, WeightLoad

LANE = "agents"
ANSWER = 32  # tokens
WAYS = {
    "off": (False, PauseMode.IN_PLACE),
    "retract": (True, PauseMode.RETRACT),
    "versions": (True, PauseMode.IN_PLACE),
}


@dataclass(slots=True)
class Agent:
    """One conversation. `history` holds every token so far, the prefix included."""

    number: int
    history: list[int]
    turn: int = 0
    asked_at: float = 0.0
    release: int = 0  # when it asked
    shareable: int = 0  # tokens of its prompt that were computed, or asked for, under that release
    waiting: bool = True  # for the first token of its answer


@dataclass(slots=True)
class Outcome:
    seconds: float = 0.0
    processor: float = 0.0  # seconds
    output_tokens: int = 0
    first_token: list[float] = field(default_factory=list)  # seconds, one for each turn
    computed_tokens: int = 0
    hit_tokens: int = 0  # these two of turns that no publication met before their first token
    shareable_tokens: int = 0  # on whole pages


class Traffic:
    """Drives one engine until every agent has had its turns."""

    def __init__(self, engine: LocalEngine, options: argparse.Namespace, mode: PauseMode, adapters: list[Path]) -> None:
        self.engine, self.options, self.mode, self.adapters = engine, options, mode, adapters
        self.luck = random.Random(0)
        prefix = self.ids(int(options.prefix * options.scale))
        self.agents = [Agent(number, list(prefix)) for number in range(options.agents)]
        self.turns = 0
        self.releases = 0
        self.known: set[int] = set()  # pages under the load that serves
        self.outcome = Outcome()

    def ids(self, count: int) -> list[int]:
        return [self.luck.randrange(100, 40000) for _ in range(count)]

    def run(self) -> Outcome:
        began, spent = time.perf_counter(), time.process_time()
        for agent in self.agents:
            self.ask(agent)
        while self.engine.has_work():
            for chunk in self.engine.step():
                self.take(chunk)
            if self.turns >= (self.releases + 1) * self.options.every * len(self.agents):
                self.publish()
        self.outcome.seconds, self.outcome.processor = time.perf_counter() - began, time.process_time() - spent
        self.outcome.computed_tokens = int(self.engine.report().stats["computed_tokens"])
        return self.outcome

    def ask(self, agent: Agent) -> None:
        agent.history += self.ids(max(4, int(100 * self.options.scale)))
        agent.asked_at, agent.waiting, agent.release = time.perf_counter(), True, self.releases
        pages = _pages(agent.history)
        agent.shareable = 16 * len(self.known.intersection(pages))
        self.known.update(pages)
        sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True, seed=agent.number)
        self.engine.add(
            GenerateRequest(request_id=f"{agent.number}", prompt_ids=list(agent.history), sampling=sampling, lane=LANE)
        )

    def take(self, chunk: TokenChunk) -> None:
        agent = self.agents[int(chunk.request_id)]
        if agent.waiting:
            agent.waiting = False
            if agent.release == self.releases:
                self.outcome.shareable_tokens += agent.shareable
                self.outcome.hit_tokens += chunk.cached_tokens
            self.outcome.first_token.append(time.perf_counter() - agent.asked_at)
        agent.history += chunk.token_ids
        self.outcome.output_tokens += len(chunk.token_ids)
        if chunk.ending is None:
            return
        if agent.release == self.releases or self.mode is PauseMode.RETRACT:
            self.known.update(_pages(agent.history))
        agent.turn += 1
        self.turns += 1
        if agent.turn < self.options.turns:
            self.ask(agent)

    def publish(self) -> None:
        self.releases += 1
        in_flight = [one for one in self.agents if one.turn < self.options.turns]
        computed_again = [one for one in in_flight if one.waiting or self.mode is PauseMode.RETRACT]
        self.known = {page for agent in computed_again for page in _pages(agent.history)}
        load_id = f"engine:{self.releases}"
        path = str(self.adapters[self.releases % len(self.adapters)])
        self.engine.stage(WeightLoad(runtime_load_id=load_id, content_id=load_id, kind=WeightKind.LORA, path=path))
        self.engine.pause(self.mode)
        self.engine.activate(LANE, load_id)
        self.engine.resume()
        if self.releases > 1:
            self.engine.drop(f"engine:{self.releases - 1}")


def _pages(tokens: list[int]) -> list[int]:
    """A key for each whole page before the last token, which says what is on it and before it."""
    keys, key = [], 0
    for end in range(16, len(tokens), 16):
        key = hash((key, *tokens[end - 16 : end]))
        keys.append(key)
    return keys


def make_adapters(model: Path, directory: Path) -> list[Path]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        targets = ["q_proj", "v_proj", "o_proj", "up_proj"]
        base = AutoModelForCausalLM.from_pretrained(model)
        get_peft_model(base, LoraConfig(r=8, target_modules=targets, init_lora_weights=False)).save_pretrained(
            directory / str(seed)
        )
        made.append(directory / str(seed))
    return made


def measure(model: Path, way: str, options: argparse.Namespace, adapters: list[Path]) -> Outcome:
    shares, mode = WAYS[way]
    config = LocalConfig(
        model_path=str(model), threads=options.threads, prefix_cache=shares, kv_cache_tokens=65536, max_running=64
    )
    engine = LocalEngine(config)
    try:
        return Traffic(engine, options, mode, adapters).run()
    finally:
        del engine
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--scale", type=float, default=1.0, help="length of prefix and messages")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--prefix", type=int, default=2000, help="tokens of system prompt and tools")
    parser.add_argument("--every", type=int, default=5, help="turns of the average agent between two publications")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    model = options.model or smollm2_directory()
    print(
        f"{model.name}: {options.agents} agents, {options.turns} turns, scale {options.scale}, prefix {options.prefix}"
    )
    with tempfile.TemporaryDirectory() as directory:
        adapters = make_adapters(model, Path(directory))
        rounds = [{way: measure(model, way, options, adapters) for way in WAYS} for _ in range(options.rounds)]
    for way in WAYS:
        print(f"  {way:<9} {summary([one[way] for one in rounds], [one['off'] for one in rounds])}", flush=True)


def summary(outcomes: list[Outcome], rivals: list[Outcome]) -> str:
    first = sorted(seconds for one in outcomes for seconds in one.first_token)
    last = outcomes[-1]
    gain = statistics.median(rival.processor / one.processor for one, rival in zip(outcomes, rivals, strict=True))
    wall = statistics.median(rival.seconds / one.seconds for one, rival in zip(outcomes, rivals, strict=True))
    reused = f"{last.hit_tokens} of {last.shareable_tokens}" if last.hit_tokens else "nothing"
    return (
        f"{statistics.median(one.output_tokens / one.seconds for one in outcomes):.1f} tokens/s, "
        f"{wall:.1f} times off ({gain:.1f} in processor time); first token {statistics.median(first):.2f} s, "
        f"p95 {first[int(0.95 * len(first))]:.2f} s; computed {last.computed_tokens} tokens, reused {reused} shareable"
    )


if __name__ == "__main__":
    main()
