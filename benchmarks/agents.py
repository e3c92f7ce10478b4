"""Agents that share a long system prompt, while releases are published under them, on the local engine and SGLang.

    python -m benchmarks.agents [--model DIR] [--scale 0.25] [--agents 8] [--turns 20] [--prefix 2000] [--every 5]
                                [--engines local sglang] [--ways off retract versions]

Every agent sends its next turn as soon as the one before is answered: the shared prefix, its conversation so far, and
a new message. After every `every` turns (of the average agent) a LoRA release is published under whatever is in flight.
Three ways to treat the prefix cache do the same work one after the other, `--rounds` times:

    off          nothing is shared, requests in flight keep their KV
    retract      shared; a publication drops everything and computes what is in flight again
    versions     shared; entries are keyed by load, requests in flight keep their KV (the default)

`--scale` shortens prefix and messages. Each engine runs in a process of its own with `--threads` threads, SGLang where
`make engine-sglang` built its environment; `off` on the same engine is the rival. Where others use the machine too, the
ratio of processor time is the number that means something.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._engines import Running, processor_seconds, running, sglang_is_built
from reef.demo.model import smollm2_directory
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
    asking: bool = False
    waiting: bool = False  # for the first token of its answer


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
    """Asks one engine until every agent has had its turns."""

    def __init__(self, engine: Running, options: argparse.Namespace, mode: PauseMode, adapters: list[Path]) -> None:
        self.engine, self.options, self.mode, self.adapters = engine, options, mode, adapters
        self.luck = random.Random(0)
        prefix = self.ids(int(options.prefix * options.scale))
        self.agents = [Agent(number, list(prefix)) for number in range(options.agents)]
        self.turns = 0
        self.releases = 0
        self.publishing = False
        self.known: set[int] = set()  # pages under the load that serves
        self.outcome = Outcome()

    def ids(self, count: int) -> list[int]:
        return [self.luck.randrange(100, 40000) for _ in range(count)]

    async def run(self) -> Outcome:
        await self.engine.handler.connect()
        try:
            began, spent = time.perf_counter(), processor_seconds()
            await asyncio.gather(*(self.talk(agent) for agent in self.agents))
            self.outcome.seconds, self.outcome.processor = time.perf_counter() - began, processor_seconds() - spent
        finally:
            await self.engine.handler.close()
        [report] = self.engine.backend.reports()
        self.outcome.computed_tokens = int(report.stats.get("computed_tokens", 0))
        return self.outcome

    async def talk(self, agent: Agent) -> None:
        while agent.turn < self.options.turns:
            async for chunk in self.engine.handler.generate(self.ask(agent)):
                self.take(agent, chunk)
            if not self.publishing and self.turns >= (self.releases + 1) * self.options.every * len(self.agents):
                self.publishing = True
                await self.publish()
                self.publishing = False

    def ask(self, agent: Agent) -> GenerateRequest:
        agent.history += self.ids(max(4, int(100 * self.options.scale)))
        agent.asked_at, agent.release = time.perf_counter(), self.releases
        agent.asking = agent.waiting = True
        pages = _pages(agent.history)
        agent.shareable = 16 * len(self.known.intersection(pages))
        self.known.update(pages)
        sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True, seed=agent.number)
        return GenerateRequest(
            request_id=f"{agent.number}-{agent.turn}", prompt_ids=list(agent.history), sampling=sampling, lane=LANE
        )

    def take(self, agent: Agent, chunk: TokenChunk) -> None:
        if chunk.error is not None:
            raise RuntimeError(chunk.error)
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
        agent.asking = False
        agent.turn += 1
        self.turns += 1

    async def publish(self) -> None:
        number, backend = self.releases + 1, self.engine.backend
        load_id, path = f"engine:{number}", str(self.adapters[number % len(self.adapters)])
        load = WeightLoad(runtime_load_id=load_id, content_id=load_id, kind=WeightKind.LORA, path=path)
        await asyncio.to_thread(backend.stage, load)
        self.releases = number
        again = [one for one in self.agents if one.asking and (one.waiting or self.mode is PauseMode.RETRACT)]
        self.known = {page for agent in again for page in _pages(agent.history)}
        await asyncio.to_thread(backend.pause, self.mode)
        await asyncio.to_thread(backend.activate, LANE, load_id)
        await asyncio.to_thread(backend.resume)
        if number > 1:
            await asyncio.to_thread(backend.drop, f"engine:{number - 1}")


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


def measure(name: str, model: Path, way: str, options: argparse.Namespace, adapters: list[Path]) -> Outcome:
    shares, mode = WAYS[way]
    with running(name, model, options.threads, share=shares, mode=mode, lora=True) as engine:
        return asyncio.run(Traffic(engine, options, mode, adapters).run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--scale", type=float, default=1.0, help="length of prefix and messages")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--prefix", type=int, default=2000, help="tokens of system prompt and tools")
    parser.add_argument("--every", type=int, default=5, help="turns of the average agent between two publications")
    parser.add_argument("--engines", nargs="+", choices=("local", "sglang"), default=None)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    model = options.model or smollm2_directory()
    names = options.engines or ["local", *(["sglang"] if sglang_is_built() else [])]
    print(
        f"{model.name}: {options.agents} agents, {options.turns} turns, scale {options.scale}, prefix {options.prefix}"
    )
    with tempfile.TemporaryDirectory() as directory:
        adapters = make_adapters(model, Path(directory))
        for name in names:
            found: dict[str, list[Outcome]] = {way: [] for way in options.ways}
            for _ in range(options.rounds):
                for way, outcomes in found.items():
                    outcomes.append(measure(name, model, way, options, adapters))
                    print(f"  {name:<7}{way:<9} {summary(outcomes, found[options.ways[0]])}", flush=True)


def summary(outcomes: list[Outcome], rivals: list[Outcome]) -> str:
    """Of the rounds so far; `rivals` are the outcomes of the first way in the same rounds."""
    first = sorted(seconds for one in outcomes for seconds in one.first_token)
    last = outcomes[-1]
    gain = statistics.median(rival.processor / one.processor for one, rival in zip(outcomes, rivals, strict=True))
    wall = statistics.median(rival.seconds / one.seconds for one, rival in zip(outcomes, rivals, strict=True))
    reused = f"{last.hit_tokens} of {last.shareable_tokens}" if last.hit_tokens else "nothing"
    computed = f"computed {last.computed_tokens} tokens, " if last.computed_tokens else ""
    return (
        f"{statistics.median(one.output_tokens / one.seconds for one in outcomes):.1f} tokens/s, "
        f"{wall:.1f} times the first ({gain:.1f} in processor time); first token {statistics.median(first):.2f} s, "
        f"p95 {first[int(0.95 * len(first))]:.2f} s; {computed}reused {reused} shareable"
    )


if __name__ == "__main__":
    main()
