"""Supervised cross-entropy: raise the log-probability of the given tokens, each by its advantage as a weight."""

from __future__ import annotations

from torch import Tensor

from reef.train.objectives.tokens import ObjectiveParams, TokenBatch


class Params(ObjectiveParams, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """No parameters of its own."""


def loss(tokens: TokenBatch, params: Params) -> tuple[Tensor, dict[str, float]]:
    """Weighted mean of -advantage * logprob, nats."""
    return -(tokens.weights * tokens.advantages * tokens.logprobs).sum(), {}
