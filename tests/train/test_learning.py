"""SmolLM2 learns: a rewarded answer becomes likelier, a punished one less so."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from transformers import AutoTokenizer

from reef.runtime.interfaces import TrainSample
from reef.train.torch_backend.config import TorchConfig
from reef.train.torch_backend.worker import TorchWorker
from tests.train.batches import job


def answer_samples(tokenizer, worker) -> list[TrainSample]:
    samples = []
    for review in ("A wonderful film.", "Dull and far too long."):
        messages = [{"role": "user", "content": f"Review: {review}\nIs it positive or negative?"}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for answer, advantage in (("purple", 1.0), ("The review is", -1.0)):
            output = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
            samples.append(
                TrainSample(
                    record_id=answer,
                    prompt_ids=prompt,
                    output_ids=output,
                    logprobs=recorded(worker, prompt, output),
                    advantages=[advantage] * len(output),
                )
            )
    return samples


def recorded(worker, prompt: list[int], output: list[int]) -> list[float]:
    return worker._policy.score(prompt + output)[len(prompt) - 1 :]


def test_a_rewarded_answer_becomes_likelier(smollm2, tmp_path):
    worker = TorchWorker(str(smollm2), TorchConfig(learning_rate=1e-3, threads=1))
    samples = answer_samples(AutoTokenizer.from_pretrained(smollm2), worker)
    before = [sum(sample.logprobs) for sample in samples]
    result = None
    for step in range(4):
        for sample in samples:
            sample.logprobs = recorded(worker, sample.prompt_ids, sample.output_ids)
        result = worker.train(job(tmp_path / str(step), samples, after=result))
        assert result.metrics["mismatch_mean"] < 0.15  # bfloat16: packed and alone round differently
    after = [sum(recorded(worker, sample.prompt_ids, sample.output_ids)) for sample in samples]
    for sample, old, new in zip(samples, before, after, strict=True):
        moved = new - old
        assert moved > 3.0 if sample.record_id == "purple" else moved < -1.0, (sample.record_id, old, new)
