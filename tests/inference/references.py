"""Reference answers from transformers and PEFT, and engines to compare with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from reef.inference.local.config import LocalConfig
from reef.inference.local.engine import LocalEngine
from reef.runtime.interfaces import (
    BASE_LANE,
    Ending,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
    WeightKind,
    WeightLoad,
)

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Answer:
    """What an engine said to one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    load_ids: list[str] = field(default_factory=list)  # per token
    ending: Ending | None = None
    stopped_by: str | None = None
    cached_tokens: int = 0
    error: str | None = None

    def take(self, chunk: TokenChunk) -> None:
        assert self.ending is None, "a chunk after the last"
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.sampled_logprobs += chunk.sampled_logprobs
        self.top_logprobs += chunk.top_logprobs
        self.load_ids += [chunk.runtime_load_id] * len(chunk.token_ids)
        self.ending, self.stopped_by, self.error = chunk.ending, chunk.stopped_by, chunk.error
        self.cached_tokens = chunk.cached_tokens


def engine(path: Path, **options: Any) -> LocalEngine:
    defaults = {"dtype": "float32", "kv_cache_tokens": 2048, "page_size": 8, "max_batch_tokens": 64, "max_running": 16}
    defaults["grammar_timeout"] = 200.0  # on a busy machine, too
    return LocalEngine(LocalConfig(model_path=str(path), **{**defaults, **options}))


def request(
    request_id: str, prompt_ids: list[int], *, lane: str = BASE_LANE, load: str | None = None, **sampling: Any
) -> GenerateRequest:
    options = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "seed": sum(request_id.encode()), **sampling}
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=SamplingParams(**options),
        lane=lane,
        runtime_load_id=load,
    )


def collect(answers: dict[str, Answer], chunks: Iterable[TokenChunk]) -> None:
    for chunk in chunks:
        answers.setdefault(chunk.request_id, Answer()).take(chunk)


def run(
    tested: LocalEngine, requests: Iterable[GenerateRequest] = (), before_step: Callable[[int], None] | None = None
) -> dict[str, Answer]:
    """Add `requests`, step until nothing is left, return the answers by request id."""
    answers: dict[str, Answer] = {}
    for one in requests:
        tested.add(one)
    for step in range(5000):
        if before_step is not None:
            before_step(step)
        if not tested.has_work():
            return answers
        collect(answers, tested.step())
    raise AssertionError("the engine does not finish")


def reference_model(path: Path, adapter: Path | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model if adapter is None else PeftModel.from_pretrained(model, adapter).eval()


@torch.no_grad()
def reference_logprobs(model: Any, prompt_ids: list[int], output_ids: list[int]) -> list[float]:
    """Of each output token, from one full forward pass."""
    ids = torch.tensor([prompt_ids + output_ids])
    table = model(ids).logits[0, len(prompt_ids) - 1 : -1].float().log_softmax(-1)
    return table.gather(1, torch.tensor(output_ids)[:, None])[:, 0].tolist()


@torch.no_grad()
def reference_greedy(model: Any, prompt_ids: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt_ids])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return output[0, len(prompt_ids) :].tolist()


def far(left: list[float], right: list[float]) -> float:
    """Largest difference."""
    assert len(left) == len(right) > 0
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def make_adapter(
    base: Path, target: Path, *, seed: int, targets: tuple[str, ...] = ALL_TARGETS, **options: Any
) -> Path:
    """A random adapter whose effect is large."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=list(targets),
        init_lora_weights=False,
        **{"r": 4, "lora_alpha": 6, **options},
    )
    get_peft_model(model, config).save_pretrained(target)
    return target


def make_full(base: Path, target: Path, *, seed: int, **options: Any) -> Path:
    """The base with other weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(target, **options)
    return target


def lora_load(load_id: str, path: Path) -> WeightLoad:
    return WeightLoad(runtime_load_id=load_id, content_id=f"content of {load_id}", kind=WeightKind.LORA, path=str(path))


def full_load(load_id: str, path: Path) -> WeightLoad:
    return WeightLoad(runtime_load_id=load_id, content_id=f"content of {load_id}", kind=WeightKind.FULL, path=str(path))
