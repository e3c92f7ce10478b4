"""Token-level policy gradient with an importance ratio, r = exp(logprobs - old_logprobs).

Clip variants, with low = 1 - clip_low and high = 1 + clip_high:
`none`: r * A. `ppo`: min(r * A, clip(r, low, high) * A) (Schulman et al. 2017, eq. 7; asymmetric bounds from DAPO).
`cispo`: clip(r, low, high) * A * logprob with the ratio as a constant, so that clipped tokens keep a gradient
(MiniMax-M1, 2025, section 3.1).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor

from reef.train.objectives import kl
from reef.train.objectives.tokens import ObjectiveParams, TokenBatch

Clip = Literal["none", "ppo", "cispo"]


class Params(ObjectiveParams, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`kl_coefficient` adds KL to the base model, `entropy_coefficient` subtracts the mean entropy."""

    clip: Clip = "none"
    clip_low: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.2
    clip_high: Annotated[float, msgspec.Meta(ge=0.0)] = 0.28
    kl_coefficient: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    kl_estimator: kl.Estimator = "k2"
    entropy_coefficient: float = 0.0

    @property
    def needs_base(self) -> bool:
        return self.kl_coefficient > 0.0


def loss(tokens: TokenBatch, params: Params) -> tuple[Tensor, dict[str, float]]:
    """Weighted mean over the tokens of minus the surrogate, plus the KL and entropy terms."""
    ratio = torch.exp(tokens.logprobs - tokens.old_logprobs)
    surrogate, clipped = _surrogate(ratio, tokens, params)
    per_token = -surrogate
    if params.kl_coefficient > 0.0:
        assert tokens.base_logprobs is not None
        divergence = kl.estimate(tokens.logprobs, tokens.base_logprobs, params.kl_estimator)
        per_token = per_token + params.kl_coefficient * divergence
    if params.entropy_coefficient != 0.0:
        per_token = per_token - params.entropy_coefficient * tokens.entropy
    return (tokens.weights * per_token).sum(), {"clip_fraction": float((tokens.weights * clipped).sum())}


def _surrogate(ratio: Tensor, tokens: TokenBatch, params: Params) -> tuple[Tensor, Tensor]:
    """The objective to maximise at each token, and 1.0 where clipping changed it."""
    advantages = tokens.advantages
    bounded = ratio.clamp(1.0 - params.clip_low, 1.0 + params.clip_high)
    if params.clip == "none":
        return ratio * advantages, torch.zeros_like(ratio)
    if params.clip == "ppo":
        return torch.minimum(ratio * advantages, bounded * advantages), (
            bounded * advantages < ratio * advantages
        ).float()
    if params.clip == "cispo":
        return bounded.detach() * advantages * tokens.logprobs, (bounded != ratio).float()
    raise ValueError(f"clip must be none, ppo or cispo, got {params.clip!r}")
