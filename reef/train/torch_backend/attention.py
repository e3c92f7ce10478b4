"""Attention over the blocks of a micro-batch, registered with transformers under `reef_blocks`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from reef.train.torch_backend.packing import Block

NAME = "reef_blocks"

SMALL_BLOCK_TOKENS = 256
"""Blocks up to this length attend without a fused kernel."""


@dataclass(slots=True, frozen=True)
class BlockPlan:
    """Blocks as tensors: `masks[b]` is additive, [length, num_keys], or None for a causal block without ancestors."""

    lengths: list[int]
    ancestors: list[tuple[int, ...]]
    masks: list[Tensor | None]


def plan_blocks(blocks: list[Block], device: torch.device, dtype: torch.dtype) -> BlockPlan:
    """Prepare once what every layer of the forward pass needs."""
    masks: list[Tensor | None] = []
    for block in blocks:
        length = block.end - block.start
        seen = sum(blocks[a].end - blocks[a].start for a in block.ancestors)
        if block.mask is None and not seen and length > SMALL_BLOCK_TOKENS:
            masks.append(None)
            continue
        own = torch.ones(length, length).tril().bool() if block.mask is None else torch.from_numpy(block.mask)
        visible = torch.cat([torch.ones(length, seen, dtype=torch.bool), own], dim=1)
        kind = torch.float32 if length <= SMALL_BLOCK_TOKENS else dtype
        masks.append(torch.zeros(visible.shape, dtype=kind).masked_fill_(~visible, float("-inf")).to(device))
    return BlockPlan([b.end - b.start for b in blocks], [b.ancestors for b in blocks], masks)


def block_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    block_plan: BlockPlan,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within the plan: `query` is [1, num_heads, num_packed, head_dim]; returns [1, num_packed, ...]."""
    queries, keys, values = (states[0].split(block_plan.lengths, dim=1) for states in (query, key, value))
    outputs = []
    for index, (ancestors, mask) in enumerate(zip(block_plan.ancestors, block_plan.masks, strict=True)):
        q, k, v = queries[index], keys[index], values[index]
        if ancestors:
            k, v = (torch.cat([*(part[a] for a in ancestors), part[index]], dim=1) for part in (keys, values))
        small = mask is not None and q.shape[1] <= SMALL_BLOCK_TOKENS
        outputs.append(_attend_small(q, k, v, mask, scaling) if small else _attend(q, k, v, mask, scaling))
    return torch.cat(outputs, dim=1).transpose(0, 1)[None], None


def _attend_small(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Plain attention in float32. A fused kernel's backward pass is about three times slower here on a CPU."""
    num_heads, length, head_dim = query.shape
    grouped = query.reshape(key.shape[0], -1, head_dim).float()  # query heads that share a key head are adjacent
    scores = torch.bmm(grouped, key.float().transpose(1, 2)).mul_(scaling)
    scores = scores.view(-1, length, key.shape[1]).add_(mask)
    attended = torch.bmm(torch.softmax(scores, dim=-1).view(key.shape[0], -1, key.shape[1]), value.float())
    return attended.to(query.dtype).view(num_heads, length, head_dim)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    repeats = query.shape[0] // key.shape[0]
    key, value = (states.repeat_interleave(repeats, dim=0) for states in (key, value))
    return scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=scaling
    )[0]


AttentionInterface.register(NAME, block_attention)
