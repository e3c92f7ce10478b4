"""Agents that share a long system prompt, while releases are published under them: the local engine and SGLang.

    python -m benchmarks.agents [--engines local sglang] [--ways off retract versions] [--scale 0.25] [--agents 8]
                                [--turns 20] [--prefix 2000] [--every 5] [--answer 32] [--rounds 1] [--json FILE]

Every agent sends its next turn as soon as the one before is answered: the shared prefix, its conversation so far, and
a new message. After every `every` turns (of the average agent) a LoRA release is published under whatever is in flight.
Three ways to treat the prefix cache do the same work in turns, each on an engine of its own, `--rounds` times:

    off          nothing is shared, requests in flight keep their KV
    retract      shared; a publication drops everything and computes what is in flight again
    versions     shared; entries are keyed by load, requests in flight keep their KV (the default)

The engine is a process of its own behind its handler, SGLang's where `make engine-sglang` built its environment; the
first of `--ways` is the rival. `--scale` shortens prefix and messages; unless it and `--turns` are given, SGLang, which
takes an hour for all of it on a CPU, gets less. Where others use the machine too, the ratio of processor time is what
means something. It fails if anything is reused that was not computed under the same release.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._engines import DTYPE, Running, processor_seconds, running, sglang_is_built
from reef.demo.model import smollm2_directory
from reef.runtime.interfaces import (
    BASE_LOAD_ID,
    Ending,
    GenerateRequest,
    PauseMode,
    SamplingParams,
    TokenChunk,
    WeightKind,
    WeightLoad,
)

LANE = "agents"
WAYS = {
    "off": (False, PauseMode.IN_PLACE),
    "retract": (True, PauseMode.RETRACT),
    "versions": (True, PauseMode.IN_PLACE),
}
PAGE = {"local": 16, "sglang": 1}  # tokens; what an engine shares is whole pages
SIZE = {"local": (1.0, 20), "sglang": (0.25, 8)}  # scale and turns, unless they are given
FOLLOWS = {"local": True, "sglang": False}
"""Whether a request in flight goes on with a new release; on SGLang it keeps the adapter that it began with."""


@dataclass(slots=True, eq=False)
class Agent:
    """One conversation. `history` holds every token so far, the prefix included."""

    number: int
    history: list[int]
    waiting: bool = False  # for the first token of an answer


@dataclass(slots=True)
class Outcome:
    seconds: float = 0.0
    processor: float = 0.0  # seconds
    output_tokens: int = 0
    first_token: list[float] = field(default_factory=list)  # seconds, one for each turn
    releases: int = 0
    prompt_tokens: int = 0  # these three of turns that no publication met before their first token
    hit_tokens: int = 0
    shareable_tokens: int = 0  # on whole pages that were computed, or asked for, under the same release


class Traffic:
    """Drives one engine until every agent has had its turns."""

    def __init__(self, engine: Running, name: str, way: str, options: argparse.Namespace, adapters: list[Path]) -> None:
        self.engine, self.options, self.adapters = engine, options, adapters
        self.shares, self.mode = WAYS[way]
        self.title, self.page = f"{name} {way}", PAGE[name]
        self.follows = FOLLOWS[name]
        self.recomputes = self.follows and self.mode is PauseMode.RETRACT
        self.luck = [random.Random(number) for number in range(options.agents)]
        prefix = self.ids(0, options.prefix)
        self.agents = [Agent(number, list(prefix)) for number in range(options.agents)]  # that have turns left
        self.ended = asyncio.Semaphore(0)  # turns that the publisher has not counted yet
        self.served = BASE_LOAD_ID  # what answers whoever asks now
        self.barriers = 0  # goes up when a barrier is asked for, and when it stands
        self.known: set[int] = set()  # pages under `served`
        self.perhaps: set[int] = set()  # more, if a request that the barrier met had not reached the engine yet
        self.outcome = Outcome()

    def ids(self, agent: int, count: int) -> list[int]:
        return [self.luck[agent].randrange(100, 40000) for _ in range(max(4, int(count * self.options.scale)))]

    async def run(self) -> Outcome:
        await self.engine.handler.connect()
        try:
            await self.ask(Agent(0, list(range(10, 42))))  # warms up, with tokens that no agent has
            self.outcome, self.known = Outcome(), set()
            self.began, spent = time.perf_counter(), processor_seconds()
            async with asyncio.TaskGroup() as group:
                group.create_task(self.publish_in_time())
                for agent in self.agents:
                    group.create_task(self.converse(agent))
            self.outcome.seconds = time.perf_counter() - self.began
            self.outcome.processor = processor_seconds() - spent
        finally:
            print(file=sys.stderr)
            await self.engine.handler.close()
        return self.outcome

    async def converse(self, agent: Agent) -> None:
        for _ in range(self.options.turns):
            agent.history += self.ids(agent.number, 100)
            await self.ask(agent)
            self.ended.release()
            turns, seconds = len(self.outcome.first_token), time.perf_counter() - self.began
            progress = f"{turns} of {self.options.agents * self.options.turns} turns, {seconds:.0f} s"
            print(f"\r{self.title}: {progress}, {self.outcome.releases} releases", end="", file=sys.stderr, flush=True)
        self.agents.remove(agent)

    async def ask(self, agent: Agent) -> None:
        pages, barriers, asked = self.pages(agent.history), self.barriers, time.perf_counter()
        shareable = self.page * len(self.known.intersection(pages)) if self.shares else 0
        at_most = self.page * len((self.known | self.perhaps).intersection(pages)) if self.shares else 0
        self.known.update(pages)
        agent.waiting, first_load = True, ""
        sampling = SamplingParams(max_tokens=self.options.answer, ignore_eos=True)
        request = GenerateRequest(
            request_id=str(agent.number), prompt_ids=list(agent.history), sampling=sampling, lane=LANE
        )
        async for chunk in self.engine.handler.generate(request):
            if chunk.ending not in (None, Ending.LENGTH):
                raise RuntimeError(f"{self.title}: {chunk.ending}: {chunk.error}")
            if agent.waiting:
                agent.waiting, first_load = False, chunk.runtime_load_id
                self.outcome.first_token.append(time.perf_counter() - asked)
                if barriers == self.barriers:
                    self.count(chunk, len(request.prompt_ids), shareable, at_most)
            agent.history += chunk.token_ids
            self.outcome.output_tokens += len(chunk.token_ids)
        if chunk.runtime_load_id == self.served and (first_load == self.served or self.recomputes):
            self.known.update(self.pages(agent.history))

    def count(self, chunk: TokenChunk, prompt_tokens: int, shareable: int, at_most: int) -> None:
        """Raises RuntimeError for an answer under another release, or reuse of what was not computed under this one."""
        if chunk.runtime_load_id != self.served:
            raise RuntimeError(f"{self.title}: {chunk.runtime_load_id} answers, {self.served} is served")
        if chunk.cached_tokens > at_most:
            raise RuntimeError(f"{self.title}: {chunk.cached_tokens} tokens reused, {at_most} were shareable")
        self.outcome.prompt_tokens += prompt_tokens
        self.outcome.hit_tokens += chunk.cached_tokens
        self.outcome.shareable_tokens += max(shareable, chunk.cached_tokens)

    async def publish_in_time(self) -> None:
        turns, between = self.options.agents * self.options.turns, self.options.agents * self.options.every
        for number in range(1, -(-turns // between)):
            for _ in range(between):
                await self.ended.acquire()
            await self.publish(f"engine:{number}", self.adapters[number % len(self.adapters)])

    async def publish(self, load_id: str, path: Path) -> None:
        backend, replaced = self.engine.backend, self.served
        load = WeightLoad(runtime_load_id=load_id, content_id=load_id, kind=WeightKind.LORA, path=str(path))
        await asyncio.to_thread(backend.stage, load)
        self.barriers += 1
        await asyncio.to_thread(backend.pause, self.mode)
        self.barriers += 1
        self.served = load_id
        again = [agent for agent in self.agents if agent.waiting or self.recomputes]
        pages = {page for agent in again for page in self.pages(agent.history)}
        self.known, self.perhaps = (pages, set()) if self.follows else (set(), pages)
        await asyncio.to_thread(backend.activate, LANE, load_id)
        await asyncio.to_thread(backend.resume)
        self.outcome.releases += 1
        if replaced != BASE_LOAD_ID:
            await asyncio.to_thread(backend.drop, replaced)

    def pages(self, tokens: list[int]) -> list[int]:
        """A key for each whole page before the last token, which says what is on it and before it."""
        keys, key = [], 0
        for end in range(self.page, len(tokens), self.page):
            key = hash((key, *tokens[end - self.page : end]))
            keys.append(key)
        return keys


def make_adapters(model: Path, directory: Path) -> list[Path]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        base = AutoModelForCausalLM.from_pretrained(model)
        get_peft_model(base, LoraConfig(r=8, target_modules=targets, init_lora_weights=False)).save_pretrained(
            directory / str(seed)
        )
        made.append(directory / str(seed))
    return made


def measure(name: str, way: str, model: Path, options: argparse.Namespace, adapters: list[Path]) -> Outcome:
    shares, mode = WAYS[way]
    with running(name, model, options.threads, share=shares, mode=mode, lora=True) as engine:
        return asyncio.run(Traffic(engine, name, way, options, adapters).run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--engines", nargs="+", choices=tuple(SIZE), default=None, help="default: those there are")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--scale", type=float, default=None, help="length of prefix and messages; default: 1, or short")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--turns", type=int, default=None, help="of each agent; default: 20, or short")
    parser.add_argument("--prefix", type=int, default=2000, help="tokens of system prompt and tools")
    parser.add_argument("--answer", type=int, default=32, help="tokens")
    parser.add_argument("--every", type=int, default=5, help="turns of the average agent between two publications")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, help="write the results here, too")
    options = parser.parse_args()
    model = options.model or smollm2_directory()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        adapters = make_adapters(model, Path(directory))
        for name in options.engines or ["local", *(["sglang"] if sglang_is_built() else [])]:
            scale, turns = SIZE[name]
            sized = argparse.Namespace(**vars(options))
            sized.scale, sized.turns = options.scale or scale, options.turns or turns
            rounds = [
                {way: measure(name, way, model, sized, adapters) for way in options.ways} for _ in range(options.rounds)
            ]
            print(
                f"{name}, {model.name}, {DTYPE}, {options.threads} threads: {options.agents} agents, {sized.turns} "
                f"turns, scale {sized.scale:g}, prefix {options.prefix}, load average {os.getloadavg()[0]:.1f}"
            )
            for way in options.ways:
                outcomes, rivals = [one[way] for one in rounds], [one[options.ways[0]] for one in rounds]
                print(f"  {way:<9} {summary(outcomes, rivals, options.ways[0])}", flush=True)
                results += [{"engine": name, "way": way, "scale": sized.scale, **asdict(one)} for one in outcomes]
    if options.json is not None:
        options.json.write_text(json.dumps(results) + "\n")


def summary(outcomes: list[Outcome], rivals: list[Outcome], rival: str) -> str:
    first = sorted(seconds for one in outcomes for seconds in one.first_token)
    last = outcomes[-1]
    gain = statistics.median(other.processor / one.processor for one, other in zip(outcomes, rivals, strict=True))
    wall = statistics.median(other.seconds / one.seconds for one, other in zip(outcomes, rivals, strict=True))
    return (
        f"{statistics.median(one.output_tokens / one.seconds for one in outcomes):.1f} tokens/s, "
        f"{wall:.1f} times {rival} ({gain:.1f} in processor time); first token {statistics.median(first):.2f} s, "
        f"p95 {first[int(0.95 * len(first))]:.2f} s; reused {last.hit_tokens} of {last.shareable_tokens} shareable, "
        f"of {last.prompt_tokens} asked; {last.releases} releases"
    )


if __name__ == "__main__":
    main()
