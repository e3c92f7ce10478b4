"""Per-token estimates of KL(policy || reference) in nats from samples of the policy, and the objective made of one.

With r = log policy - log reference at the sampled token (Schulman, "Approximating KL divergence", 2020):
k1 = r is unbiased and noisy; k2 = r^2 / 2 is biased, but its gradient is that of the KL when the samples are on
policy; k3 = exp(-r) - 1 + r is unbiased, never negative, and its gradient is that of KL(reference || policy).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from reef.train.objectives.tokens import ObjectiveParams, TokenBatch

Estimator = Literal["k1", "k2", "k3"]


class Params(ObjectiveParams, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`coefficient` scales the loss; `estimator` defaults to the one with the right gradient."""

    coefficient: float = 1.0
    estimator: Estimator = "k2"

    @property
    def needs_base(self) -> bool:
        return True


def estimate(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(policy || reference) at each token, nats [num_tokens]. Differentiable in `logprobs`."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"estimator must be k1, k2 or k3, got {estimator!r}")


def loss(tokens: TokenBatch, params: Params) -> tuple[Tensor, dict[str, float]]:
    """Pull the policy back to the base model: the weighted mean of the estimate."""
    assert tokens.base_logprobs is not None
    divergence = estimate(tokens.logprobs, tokens.base_logprobs, params.estimator)
    return params.coefficient * (tokens.weights * divergence).sum(), {}
