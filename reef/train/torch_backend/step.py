"""One optimizer step: from samples with advantages to moved masters and what can be said about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reef.errors import TrainingError
from reef.runtime.interfaces import TrainSample
from reef.train.objectives import LossFunction, TokenBatch, kl, token_weights
from reef.train.torch_backend.model import Policy
from reef.train.torch_backend.optimizer import MasterOptimizer
from reef.train.torch_backend.packing import MicroBatch, TrainedSequence, pack


@dataclass(slots=True, frozen=True)
class StepTokens:
    """The trained tokens of a step, sample after sample; tensors are [num_trained]."""

    sequences: list[TrainedSequence]
    old_logprobs: Tensor
    advantages: Tensor
    sample_ids: Tensor


def collect_tokens(samples: Sequence[TrainSample], vocabulary: int, max_tokens: int) -> StepTokens:
    """Check the samples and lay out their trained tokens. Raises TrainingError naming the record that is wrong."""
    sequences: list[TrainedSequence] = []
    columns: list[np.ndarray[Any, Any]] = []
    size = 0
    for index, sample in enumerate(samples):
        _check(sample, vocabulary, max_tokens)
        counted = np.flatnonzero(np.ones(len(sample.output_ids), np.bool_) if sample.mask is None else sample.mask)
        if not len(counted):
            continue
        slots = np.arange(size, size + len(counted))
        token_ids = np.array(sample.prompt_ids + sample.output_ids, np.int64)
        sequences.append(TrainedSequence(token_ids, counted + len(sample.prompt_ids), slots))
        values = np.array([sample.logprobs, sample.advantages])[:, counted]
        columns.append(np.vstack([values, np.full(len(counted), index)]))
        size += len(counted)
    if not size:
        raise TrainingError("the batch has no token to train on")
    table = torch.from_numpy(np.hstack(columns))
    return StepTokens(sequences, table[0].float(), table[1].float(), table[2].long())


def take_step(
    policy: Policy, optimizer: MasterOptimizer, tokens: StepTokens, loss: LossFunction, budget: int
) -> dict[str, Any]:
    """Move the masters by one step and return its metrics. Raises TrainingError, with nothing moved, if not finite."""
    batches = pack(tokens.sequences, budget)
    weights = token_weights(tokens.sample_ids, loss.params.normalization)
    whole = TokenBatch(
        logprobs=torch.zeros_like(weights),
        old_logprobs=tokens.old_logprobs,
        advantages=tokens.advantages,
        weights=weights,
        entropy=torch.zeros_like(weights),
        base_logprobs=torch.zeros_like(weights) if loss.params.needs_base else None,
    )
    policy.drop_gradients()
    for batch in batches:
        _accumulate(policy, batch, whole, loss)
    value, own_metrics = loss(whole)
    if not math.isfinite(value):
        policy.drop_gradients()
        raise TrainingError(f"the loss is {float(value)}; largest importance ratio {_ratio(whole).max():.3g}")
    norm = optimizer.clip()
    if not math.isfinite(norm):
        policy.drop_gradients()
        raise TrainingError(f"the gradient's norm is {norm}")
    optimizer.step()
    policy.drop_gradients()
    policy.synchronize()
    return {
        "loss": float(value),
        "grad_norm": norm,
        "learning_rate": optimizer.learning_rate,
        "optimizer_steps": optimizer.steps,
        **own_metrics,
        **_describe(whole),
        "samples": len(tokens.sequences),
        "micro_batches": len(batches),
        "trained_tokens": len(weights),
        "processed_tokens": sum(len(batch.token_ids) for batch in batches),
        "unshared_tokens": sum(len(sequence.inputs) for sequence in tokens.sequences),
    }


def _accumulate(policy: Policy, batch: MicroBatch, whole: TokenBatch, loss: LossFunction) -> None:
    """Add one micro-batch's gradients, and write its log-probabilities into the step's vectors."""
    slots = torch.from_numpy(batch.slots)
    base = policy.base_logprobs(batch).cpu() if loss.params.needs_base else None
    logprobs, entropy = (values.cpu() for values in policy.forward(batch))
    part = TokenBatch(
        logprobs=logprobs,
        old_logprobs=whole.old_logprobs[slots],
        advantages=whole.advantages[slots],
        weights=whole.weights[slots],
        entropy=entropy,
        base_logprobs=base,
    )
    loss(part)[0].backward()
    policy.collect_gradients()
    whole.logprobs[slots], whole.entropy[slots] = logprobs.detach(), entropy.detach()
    if base is not None and whole.base_logprobs is not None:
        whole.base_logprobs[slots] = base


def _ratio(tokens: TokenBatch) -> Tensor:
    return torch.exp(tokens.logprobs - tokens.old_logprobs)


def _describe(tokens: TokenBatch) -> dict[str, float]:
    """Statistics before the step; means are over tokens. `kl` is to the behaviour, which sampled the tokens."""
    ratio = _ratio(tokens)
    mismatch = (tokens.logprobs - tokens.old_logprobs).abs()
    metrics = {
        "ratio_mean": float(ratio.mean()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "kl": float(kl.estimate(tokens.old_logprobs, tokens.logprobs, "k3").mean()),
        "entropy": float(tokens.entropy.mean()),
        "mismatch_mean": float(mismatch.mean()),
        "mismatch_max": float(mismatch.max()),
    }
    if tokens.base_logprobs is not None:
        metrics["kl_base"] = float(kl.estimate(tokens.logprobs, tokens.base_logprobs, "k3").mean())
    return metrics


def _check(sample: TrainSample, vocabulary: int, max_tokens: int) -> None:
    length = len(sample.output_ids)
    where = f"record {sample.record_id}"
    if not sample.prompt_ids:
        raise TrainingError(f"{where}: prompt_ids is empty")
    for name in ("logprobs", "advantages", "mask"):
        values = getattr(sample, name)
        if values is None:
            continue
        if len(values) != length:
            raise TrainingError(f"{where}: {name} has {len(values)} entries for {length} output tokens")
        if not all(map(math.isfinite, values)):
            raise TrainingError(f"{where}: {name} has a value that is not finite")
    token_ids = sample.prompt_ids + sample.output_ids
    if len(token_ids) > max_tokens:
        raise TrainingError(f"{where}: {len(token_ids)} tokens, the model takes at most {max_tokens}")
    if not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
        raise TrainingError(f"{where}: token ids must be in [0, {vocabulary})")
