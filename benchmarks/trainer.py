"""One LoRA step of SmolLM2-135M: packed with shared prefixes against a padded batch, in one interleaved run.

    python -m benchmarks.trainer [--prompts 8] [--rollouts 8] [--output-tokens 8] [--rounds 3] [--threads 0] [--json F]

The rival is the usual script: transformers and peft as they come (bfloat16 base, float32 adapter, sdpa), all samples
padded into one batch, logits of the output positions only, torch's AdamW. It measures forward, backward and optimizer
step; Reef's time includes the probe under the candidate and writing the candidate and its optimizer state. Outputs are
random and all different, which shares as little as possible. Each round measures both, one right after the other; the
table shows medians. Other load on the machine moves absolute numbers; compare the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path

from reef.train.torch_backend.config import DEFAULT_TARGETS, PROCESS_ENVIRONMENT, TorchConfig

os.environ.update(PROCESS_ENVIRONMENT)  # for both, and before torch is imported

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reef.demo.model import smollm2_directory
from reef.runtime.interfaces import Objective, StepSignal, TrainJob, TrainResult, TrainSample
from reef.train.torch_backend.worker import TorchWorker

NOUNS = ("hotel", "soup", "phone", "jacket", "laptop", "movie", "pizza", "room", "delivery", "sofa", "taxi", "lamp")


def make_samples(model: Path, prompts: int, rollouts: int, output_tokens: int) -> list[TrainSample]:
    """Chat prompts of about 45 tokens, each with its own random outputs."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(0)
    samples = []
    for p in range(prompts):
        review = f"The {NOUNS[p % len(NOUNS)]} number {p} was rather more than I had hoped for."
        messages = [{"role": "user", "content": f"Review: {review}\nPositive or negative?"}]
        prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for k in range(rollouts):
            samples.append(
                TrainSample(
                    record_id=f"{p}-{k}",
                    prompt_ids=prompt_ids,
                    output_ids=[rng.randrange(1000, 49000) for _ in range(output_tokens)],
                    logprobs=[-12.0] * output_tokens,
                    advantages=[rng.gauss(0.0, 1.0)] * output_tokens,
                )
            )
    return samples


class Reef:
    """Candidate after candidate, each from the last one, as accepted releases are."""

    def __init__(self, model: Path, threads: int, directory: Path) -> None:
        self._worker = TorchWorker(str(model), TorchConfig(learning_rate=5e-4, threads=threads))
        self._directory = directory
        self._last: TrainResult | None = None
        self._count = 0

    def step(self, samples: list[TrainSample]) -> dict[str, float]:
        self._count += 1
        job = TrainJob(
            job_id=str(self._count),
            scenario="bench",
            step=self._count,
            signal=StepSignal(objective=Objective("policy_gradient", {"clip": "cispo"}), samples=samples),
            incumbent_path=self._last.weights_path if self._last else None,
            state_path=self._last.state_path if self._last else None,
            output_path=str(self._directory / str(self._count)),
            probe_ids=list(range(1000, 1064)),
        )
        self._last = self._worker.train(job)
        return self._last.metrics


class PaddedBatch:
    """The rival."""

    def __init__(self, model: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=list(DEFAULT_TARGETS))
        self._model = peft.get_peft_model(base, config)
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=5e-4)

    def step(self, samples: list[TrainSample]) -> int:
        """Return the number of positions computed, padding included."""
        longest = max(len(sample.prompt_ids) for sample in samples)
        outputs = torch.tensor([sample.output_ids for sample in samples])
        pads = [longest - len(sample.prompt_ids) for sample in samples]
        rows = [[0] * pad + sample.prompt_ids + sample.output_ids for pad, sample in zip(pads, samples, strict=True)]
        mask = [[0] * pad + [1] * (len(row) - pad) for pad, row in zip(pads, rows, strict=True)]
        ids, attention_mask = torch.tensor(rows), torch.tensor(mask)
        count = outputs.shape[1]
        position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = self._model(
            input_ids=ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=count + 1,
        ).logits[:, :-1]
        chosen = torch.log_softmax(logits.float(), dim=-1).gather(2, outputs[:, :, None]).squeeze(2)
        old = torch.tensor([sample.logprobs for sample in samples])
        advantages = torch.tensor([sample.advantages for sample in samples])
        bounded = torch.exp(chosen.detach() - old).clamp(0.8, 1.28)
        (-(bounded * advantages * chosen).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return ids.numel()


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    model = smollm2_directory()
    samples = make_samples(model, arguments.prompts, arguments.rollouts, arguments.output_tokens)
    seconds: dict[str, list[float]] = {"reef": [], "padded": []}
    with tempfile.TemporaryDirectory() as directory:
        reef, padded = Reef(model, arguments.threads, Path(directory)), PaddedBatch(model)
        reef.step(samples)
        padded.step(samples)
        for _ in range(arguments.rounds):
            started = time.perf_counter()
            metrics = reef.step(samples)
            between = time.perf_counter()
            positions = padded.step(samples)
            seconds["reef"].append(between - started)
            seconds["padded"].append(time.perf_counter() - between)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "threads": torch.get_num_threads(),
        "samples": len(samples),
        "prompt_tokens": [min(len(s.prompt_ids) for s in samples), max(len(s.prompt_ids) for s in samples)],
        "output_tokens": arguments.output_tokens,
        "positions": {"reef": metrics["processed_tokens"], "padded": positions},
        "seconds": seconds,
        "median_seconds": medians,
        "speedup": medians["padded"] / medians["reef"],
    }


def show(result: dict[str, object]) -> None:
    print(f"{result['machine']}, {result['threads']} threads")
    print(f"{result['samples']} samples, prompts {result['prompt_tokens']} tokens, outputs {result['output_tokens']}")
    print(f"{'':<42}{'positions':>10}{'s/step':>9}{'min':>8}{'max':>8}")
    for name, label in (("reef", "reef, packed with shared prefixes"), ("padded", "padded batch, transformers + peft")):
        values = result["seconds"][name]
        median = result["median_seconds"][name]
        print(f"{label:<42}{result['positions'][name]:>10}{median:>9.2f}{min(values):>8.2f}{max(values):>8.2f}")
    print(f"reef is {result['speedup']:.1f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    result = measure(arguments)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
