"""Log-probabilities of trained tokens from hidden states, without keeping a [num_rows, vocabulary] float32 matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 64
KEEP_BYTES = 256 << 20
"""Logits of the forward pass are kept for the backward pass up to this size, else computed again."""


class _HeadLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """Rows share one softmax among their targets: tokens sampled after the same prefix."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, row: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = hidden.shape[0]
        log_norm, entropy = hidden.new_empty(2, num_rows, dtype=torch.float32)
        chosen = hidden.new_empty(len(targets), dtype=torch.float32)
        keep = num_rows * weight.shape[0] * weight.element_size() <= KEEP_BYTES and any(ctx.needs_input_grad)
        kept: list[Tensor] = []
        for start in range(0, num_rows, CHUNK_ROWS):
            rows = slice(start, min(start + CHUNK_ROWS, num_rows))
            raw = hidden[rows] @ weight.T
            logits = raw.float()
            log_norm[rows] = torch.logsumexp(logits, dim=-1)
            probabilities = torch.softmax(logits, dim=-1)
            entropy[rows] = log_norm[rows] - torch.linalg.vecdot(probabilities, logits)
            tokens = torch.nonzero((row >= rows.start) & (row < rows.stop)).squeeze(1)
            chosen[tokens] = logits[row[tokens] - rows.start, targets[tokens]]
            if keep:
                kept.append(raw)
        ctx.save_for_backward(hidden, weight, row, targets, log_norm, entropy, *kept)
        return chosen - log_norm[row], entropy[row]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grad_logprobs, grad_entropy = gradients
        hidden, weight, row, targets, log_norm, entropy, *kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        by_row = torch.zeros_like(log_norm).index_add_(0, row, grad_logprobs)
        entropy_by_row = torch.zeros_like(log_norm).index_add_(0, row, grad_entropy)
        entropy_trains = bool(entropy_by_row.any())
        for chunk, start in enumerate(range(0, hidden.shape[0], CHUNK_ROWS)):
            rows = slice(start, min(start + CHUNK_ROWS, hidden.shape[0]))
            logits = (kept[chunk] if kept else hidden[rows] @ weight.T).float()
            logits -= log_norm[rows, None]
            grad = torch.exp(logits)
            # d entropy / d logit = -p * (log p + entropy); d logprob / d logit = onehot - p
            if entropy_trains:
                scale = by_row[rows, None] + entropy_by_row[rows, None] * (logits + entropy[rows, None])
                grad.mul_(scale).neg_()
            else:
                grad.mul_(-by_row[rows, None])
            tokens = torch.nonzero((row >= rows.start) & (row < rows.stop)).squeeze(1)
            # index_add_ adds in order on a CPU, index_put_ need not: rows that several tokens share must not vary
            flat = (row[tokens] - rows.start) * grad.shape[1] + targets[tokens]
            grad.view(-1).index_add_(0, flat, grad_logprobs[tokens])
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight += (grad.T @ hidden[rows]).float()
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def head_logprobs(hidden: Tensor, weight: Tensor, row: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, float32 [num_trained], nats.

    `hidden` [num_rows, hidden_size] and the head's `weight` [vocabulary, hidden_size] multiply in their own dtype, the
    softmax is float32. Token t has target `targets[t]` in the distribution of row `row[t]`.
    """
    return _HeadLogprobs.apply(hidden, weight, row, targets)  # type: ignore[no-any-return]
