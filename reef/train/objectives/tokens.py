"""What every objective reads: one entry per trained token, and the weight that token has in the step's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from torch import Tensor

Normalization = Literal["token", "sequence"]


class ObjectiveParams(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Parameters that every objective has."""

    normalization: Normalization = "token"

    @property
    def needs_base(self) -> bool:
        """True if the loss reads log-probabilities under the base model."""
        return False


@dataclass(slots=True, kw_only=True)
class TokenBatch:
    """The trained tokens of a step or of a part of it. All tensors are float32 [num_tokens].

    `weights` come from `token_weights` over the whole step, so that the losses of a step's parts add up to its loss.
    """

    logprobs: Tensor
    old_logprobs: Tensor  # behaviour: recorded when the token was sampled
    advantages: Tensor
    weights: Tensor
    entropy: Tensor  # of the distribution that the token was drawn from, nats
    base_logprobs: Tensor | None = None


def token_weights(sample_ids: Tensor, normalization: Normalization, mask: Tensor | None = None) -> Tensor:
    """Weight of each token in the step's loss, float32 [num_tokens]; they sum to 1.

    `token`: every token weighs the same. `sequence`: every sample weighs the same, whatever its length. Masked tokens
    weigh nothing. `sample_ids` is int64 [num_tokens].
    """
    counted = torch.ones_like(sample_ids, dtype=torch.float32) if mask is None else mask.float()
    if normalization == "token":
        return counted / counted.sum()
    if normalization == "sequence":
        lengths = torch.zeros(int(sample_ids.max()) + 1).to(counted).index_add_(0, sample_ids, counted)
        return counted / lengths[sample_ids].clamp(min=1.0) / (lengths > 0).sum()
    raise ValueError(f"normalization must be token or sequence, got {normalization!r}")
