"""Samples and jobs for the trainer's tests."""

from __future__ import annotations

import random
from pathlib import Path

from reef.runtime.interfaces import Objective, StepSignal, TrainJob, TrainResult, TrainSample

PROBE = list(range(200, 220))
POLICY_GRADIENT = Objective("policy_gradient")


def rollouts(
    prompts: int = 3, per_prompt: int = 4, prompt_tokens: int = 10, output_tokens: int = 5, seed: int = 0
) -> list[TrainSample]:
    """Random token ids; all prompts begin alike, outputs differ in length, the first two of each prompt are equal."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(2, 1000) for _ in range(count)]

    system = ids(prompt_tokens // 2)
    samples = []
    for p in range(prompts):
        prompt = system + ids(prompt_tokens - len(system) + p)
        outputs = [ids(output_tokens + k % 3) for k in range(per_prompt)]
        outputs[1 % per_prompt] = outputs[0]
        for k, output in enumerate(outputs):
            samples.append(
                TrainSample(
                    record_id=f"r{p}-{k}",
                    prompt_ids=prompt,
                    output_ids=output,
                    logprobs=[-8.0 + rng.random() for _ in output],
                    advantages=[rng.gauss(0.0, 1.0)] * len(output),
                )
            )
    return samples


def job(
    output: Path,
    samples: list[TrainSample],
    *,
    after: TrainResult | None = None,
    objective: Objective = POLICY_GRADIENT,
    job_id: str | None = None,
) -> TrainJob:
    """One step from the base, or from the candidate of `after`. The job is named after its directory."""
    return TrainJob(
        job_id=job_id or output.name,
        scenario="default",
        step=1,
        signal=StepSignal(objective=objective, samples=samples),
        incumbent_path=after.weights_path if after else None,
        state_path=after.state_path if after else None,
        output_path=str(output),
        probe_ids=PROBE,
    )


def content(directory: str | Path) -> dict[str, bytes]:
    """Every file below a directory."""
    root = Path(directory)
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


def tensors(result: TrainResult) -> dict[str, bytes]:
    """Every tensor of a candidate and of its optimizer state, as bytes."""
    import torch
    from safetensors.torch import load_file

    found = {}
    for directory in (result.weights_path, result.state_path):
        for file in sorted(Path(directory).glob("*.safetensors")):
            for name, value in load_file(file).items():
                found[f"{file.name}:{name}"] = value.contiguous().view(torch.uint8).numpy().tobytes()
    return found
