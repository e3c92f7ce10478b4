"""The local engine against `transformers` generate, on the real model.

    python -m benchmarks.engine [--model DIR] [--threads N] [--repeats N]

Three ratios: tokens per second at batch 16 and at batch 1, and how much sooner a repeated 2,000-token prefix reaches
its first token. Rival and engine take turns in one process with the same threads, in bfloat16 where the CPU computes in
it and float32 elsewhere. Wall-clock time is what a user waits; processor time is printed too, because it hardly depends
on what else the machine does. Last comes where the engine's time goes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch: threads that wait for each other by spinning starve on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks._engines import DTYPE
from reef.demo.model import smollm2_directory
from reef.inference.local.config import LocalConfig
from reef.inference.local.engine import LocalEngine
from reef.runtime.interfaces import GenerateRequest, SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS, PREFIX_TOKENS = 32, 128, 2000
Timing = tuple[float, float]  # wall-clock and processor seconds


def timed(work: Callable[[], Any]) -> Timing:
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def generate(engine: LocalEngine, prompts: list[list[int]], max_tokens: int, temperature: float = 0.0) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(GenerateRequest(request_id=str(index), prompt_ids=prompt, sampling=sampling))
    while engine.has_work():
        engine.step()


def rival_generate(model: Any, prompts: list[list[int]], max_tokens: int) -> None:
    ids = torch.tensor(prompts)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.2f}  ({min(values):.2f} to {max(values):.2f})"


def compare_generation(engine: LocalEngine, model: Any, batch: int, repeats: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    ours, rivals = [], []
    for repeat in range(repeats + 1):
        prompts = torch.randint(10, 40_000, (batch, PROMPT_TOKENS), generator=generator).tolist()
        tokens = OUTPUT_TOKENS if repeat else 4  # the first warms up
        engine.flush()
        ours.append(timed(lambda prompts=prompts, tokens=tokens: generate(engine, prompts, tokens)))
        rivals.append(timed(lambda prompts=prompts, tokens=tokens: rival_generate(model, prompts, tokens)))
    produced = batch * OUTPUT_TOKENS
    print(
        f"\nbatch {batch}, {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens each; median (range) of {repeats}"
    )
    print("  engine, tokens/s         ", spread([produced / wall for wall, _ in ours[1:]]))
    print("  transformers, tokens/s   ", spread([produced / wall for wall, _ in rivals[1:]]))
    pairs = list(zip(ours[1:], rivals[1:], strict=True))
    print("  ratio, wall-clock time   ", spread([rival[0] / own[0] for own, rival in pairs]))
    print("  ratio, processor time    ", spread([rival[1] / own[1] for own, rival in pairs]))


def compare_prefix(engine: LocalEngine, repeats: int) -> None:
    generator = torch.Generator().manual_seed(7)
    cold, warm = [], []
    for _ in range(repeats):
        prefix = torch.randint(10, 40_000, (PREFIX_TOKENS,), generator=generator).tolist()
        engine.flush()
        cold.append(timed(lambda prefix=prefix: generate(engine, [[*prefix, 11, 12, 13]], 1)))
        warm.append(timed(lambda prefix=prefix: generate(engine, [[*prefix, 21, 22, 23]], 1)))
    print(f"\nfirst token after a {PREFIX_TOKENS}-token prefix and 3 other tokens; median (range) of {repeats}")
    print("  cold, ms                 ", spread([wall * 1e3 for wall, _ in cold]))
    print("  repeated, ms             ", spread([wall * 1e3 for wall, _ in warm]))
    print("  ratio, wall-clock time   ", spread([a[0] / b[0] for a, b in zip(cold, warm, strict=True)]))
    print("  ratio, processor time    ", spread([a[1] / b[1] for a, b in zip(cold, warm, strict=True)]))


def compare_sampling(engine: LocalEngine, repeats: int) -> None:
    generator = torch.Generator().manual_seed(9)
    costs = []
    for _ in range(repeats):
        prompts = torch.randint(10, 40_000, (16, PROMPT_TOKENS), generator=generator).tolist()
        seconds = []
        for temperature in (0.0, 1.0):
            engine.flush()
            seconds.append(timed(lambda p=prompts, t=temperature: generate(engine, p, 32, t))[1])
        costs.append(seconds[1] / seconds[0])
    print(f"\nbatch 16, temperature 1 against greedy, processor time; median (range) of {repeats}")
    print("  ratio                    ", spread(costs))


class _Parts:
    """Wraps the parts of a step and adds up their processor time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            result = original(*args, **kwargs)
            self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - began
            return result

        setattr(owner, name, measured)


def print_parts(path: Path, threads: int) -> None:
    import reef.inference.local.engine as engine_module
    from reef.inference.local.native import make_ops

    parts = _Parts()
    kind = type(make_ops("auto", torch.device("cpu"), 64))
    original_linear = kind.linear

    def linear(self: Any, weight: Any, bias: Any) -> Any:
        holder = type("Holder", (), {"run": staticmethod(original_linear(self, weight, bias))})
        parts.wrap(holder, "run", "output projection" if weight.shape[0] > 20_000 else "other projections")
        return lambda x: holder.run(x)

    kind.linear = linear
    for name in ("attend", "add_norm", "silu_mul", "rotate_store"):
        parts.wrap(kind, name, name)
    parts.wrap(engine_module, "sample", "sampling")
    engine = LocalEngine(LocalConfig(model_path=str(path), threads=threads))
    prompts = torch.randint(10, 40_000, (16, PROMPT_TOKENS)).tolist()
    generate(engine, prompts, 1)
    parts.seconds.clear()
    total = timed(lambda: generate(engine, prompts, OUTPUT_TOKENS))[1]
    print("\nwhere the engine's processor time goes, batch 16, decoding")
    for part, seconds in sorted(parts.seconds.items(), key=lambda item: -item[1]):
        print(f"  {part:25s}{100 * seconds / total:6.1f} %")
    print(f"  {'the rest':25s}{100 * (1 - sum(parts.seconds.values()) / total):6.1f} %")


def print_profile(engine: LocalEngine) -> None:
    prompts = torch.randint(10, 40_000, (16, PROMPT_TOKENS)).tolist()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        generate(engine, prompts, 32)
    print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=40))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print torch's profile too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = options.model or smollm2_directory()
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):  # of the file it was converted from; it would slow the rival down
        del config.quantization_config
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=getattr(torch, DTYPE)).eval()
    engine = LocalEngine(LocalConfig(model_path=str(path), dtype=DTYPE, threads=options.threads))
    print(f"{path.name}, {DTYPE}, {options.threads} threads, torch {torch.__version__}")
    for batch in (16, 1):
        compare_generation(engine, model, batch, options.repeats)
    compare_prefix(engine, options.repeats)
    compare_sampling(engine, options.repeats)
    if options.profile:
        print_profile(engine)
    print_parts(path, options.threads)


if __name__ == "__main__":
    main()
