"""Attention over pages, and which pages each token reads.

A plan is made once per step and used by every layer. Shapes: T tokens, D head size, P page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reef.inference.local.kv_cache import NULL_PAGE


class KVTensors:
    """The memory of the KV cache: [2, layers, pages + 1, P, kv_heads, D]; the first page is NULL_PAGE, always zero."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, num_layers, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.page_size = page_size
        self._memory = torch.zeros(shape, dtype=dtype, device=device)  # untouched pages cost no memory on a CPU
        self.keys = list(self._memory[0])  # per layer [pages + 1, P, kv_heads, D]
        self.values = list(self._memory[1])

    def clear(self, pages: Sequence[int]) -> None:
        """Zero `pages`. Needed only after non-finite values: zero weights times NaN would be NaN for the next user."""
        self._memory[:, :, list(pages)] = 0


@dataclass(slots=True, frozen=True)
class Stretch:
    """Tokens [start, start + count) of the flat batch are positions [position, position + count) of one sequence."""

    start: int
    count: int
    position: int
    pages: list[int]


@dataclass(slots=True, frozen=True)
class _Prefill:
    start: int
    end: int
    pages: Tensor | None  # None: nothing precedes these tokens
    length: int  # tokens attended to by the last one
    mask: Tensor | None  # [count, length] added to the scores; None: causal


@dataclass(slots=True, frozen=True)
class _DecodeGroup:
    """Decoding sequences of similar length, padded to the longest."""

    rows: Tensor | None  # [B]; None: all rows that decode
    pages: Tensor  # [B * pages], padded with NULL_PAGE
    mask: Tensor  # [B, 1, 1, pages * P] added to the scores


@dataclass(slots=True, frozen=True)
class RowTables:
    """For kernels that read pages directly: token t < len(lengths) attends to the first lengths[t] positions."""

    pages: Tensor  # [rows, width], padded with NULL_PAGE
    lengths: Tensor  # [rows]


@dataclass(slots=True)
class AttentionPlan:
    """`kv` None computes attention within the batch only and stores nothing."""

    kv: KVTensors | None
    slots: Tensor | None = None  # [T] where each token's K and V go
    rows: RowTables | None = None  # instead of `decodes`
    num_decode: int = 0
    decodes: list[_DecodeGroup] = field(default_factory=list)
    prefills: list[_Prefill] = field(default_factory=list)


def plan_dense(num_tokens: int) -> AttentionPlan:
    """One sequence, all of it, without a cache."""
    return AttentionPlan(None, prefills=[_Prefill(0, num_tokens, None, num_tokens, None)])


def plan_paged(
    stretches: list[Stretch], kv: KVTensors, dtype: torch.dtype, device: torch.device, *, row_tables_up_to: int
) -> AttentionPlan:
    """Plan for `stretches` in the order of the flat batch, shorter ones first.

    Those of at most `row_tables_up_to` tokens get row tables; with 0, single tokens are decoded in padded groups.
    """
    slots = _slots(stretches, kv.page_size, device)
    limit = row_tables_up_to or 1
    num_short = sum(stretch.count <= limit for stretch in stretches)
    short, long = stretches[:num_short], stretches[num_short:]
    plan = AttentionPlan(kv, slots, prefills=[_prefill(stretch, kv.page_size, dtype, device) for stretch in long])
    if row_tables_up_to:
        plan.rows = _row_tables(short, kv.page_size) if short else None
    else:
        plan.num_decode = num_short
        plan.decodes = _decode_groups(short, kv.page_size, dtype, device)
    return plan


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
    """q [T, heads, D], k and v [T, kv_heads, D], which are in the cache already -> [T, heads, D]."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.decodes:
        assert plan.kv is not None
        rows = q[: plan.num_decode] if group.rows is None else q.index_select(0, group.rows)
        mixed = _attend_decode(rows, plan.kv.keys[layer], plan.kv.values[layer], group)
        if group.rows is None:
            out[: plan.num_decode] = mixed
        else:
            out.index_copy_(0, group.rows, mixed)
    attend_prefills(q, k, v, layer, plan, out)
    return out


def attend_prefills(q: Tensor, k: Tensor, v: Tensor, layer: int, plan: AttentionPlan, out: Tensor) -> None:
    """Fill the rows of `out` that belong to the plan's prefills."""
    for part in plan.prefills:
        own = slice(part.start, part.end)
        if part.pages is None:
            part_k, part_v = k[own], v[own]
        else:
            assert plan.kv is not None
            part_k = plan.kv.keys[layer].index_select(0, part.pages).flatten(0, 1)[: part.length]
            part_v = plan.kv.values[layer].index_select(0, part.pages).flatten(0, 1)[: part.length]
        out[own] = _attend_prefill(q[own], part_k, part_v, part.mask)


def _attend_decode(q: Tensor, keys: Tensor, values: Tensor, group: _DecodeGroup) -> Tensor:
    batch, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    # The query heads that share a KV head act as that head's queries, so K and V are not repeated.
    grouped = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    own_k = keys.index_select(0, group.pages).view(batch, -1, num_kv_heads, head_dim).transpose(1, 2)
    own_v = values.index_select(0, group.pages).view(batch, -1, num_kv_heads, head_dim).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(grouped, own_k, own_v, attn_mask=group.mask)
    return mixed.reshape(batch, num_heads, head_dim)


def _attend_prefill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return mixed.squeeze(0).transpose(0, 1)


def _slots(stretches: list[Stretch], page_size: int, device: torch.device) -> Tensor:
    parts = []
    for stretch in stretches:
        positions = np.arange(stretch.position, stretch.position + stretch.count)
        first = stretch.position // page_size
        pages = np.asarray(stretch.pages[first : int(positions[-1]) // page_size + 1])
        parts.append(pages[positions // page_size - first] * page_size + positions % page_size)
    return torch.from_numpy(np.concatenate(parts)).to(device)


def _prefill(stretch: Stretch, page_size: int, dtype: torch.dtype, device: torch.device) -> _Prefill:
    length = stretch.position + stretch.count
    if stretch.position == 0:
        return _Prefill(stretch.start, stretch.start + stretch.count, None, length, None)
    pages = torch.tensor(stretch.pages[: -(-length // page_size)], device=device)
    future = torch.ones(stretch.count, length, dtype=torch.bool, device=device).triu(stretch.position + 1)
    mask = torch.zeros(stretch.count, length, dtype=dtype, device=device).masked_fill_(future, -torch.inf)
    return _Prefill(stretch.start, stretch.start + stretch.count, pages, length, mask)


def _row_tables(stretches: list[Stretch], page_size: int) -> RowTables:
    lengths = np.concatenate([stretch.position + 1 + np.arange(stretch.count) for stretch in stretches])
    width = -(-int(lengths.max()) // page_size)
    table = np.full((len(lengths), width), NULL_PAGE)
    row = 0
    for stretch in stretches:
        pages = stretch.pages[:width]
        table[row : row + stretch.count, : len(pages)] = pages
        row += stretch.count
    return RowTables(torch.from_numpy(table), torch.from_numpy(lengths))


def _decode_groups(
    stretches: list[Stretch], page_size: int, dtype: torch.dtype, device: torch.device
) -> list[_DecodeGroup]:
    """Group by length so that padding at most doubles what is read."""
    if not stretches:
        return []
    lengths = np.asarray([stretch.position + 1 for stretch in stretches])
    num_pages = -(-lengths // page_size)
    order = np.argsort(num_pages, kind="stable")
    bounds = [0]
    for index in range(len(order)):
        if num_pages[order[index]] > 2 * num_pages[order[bounds[-1]]] + 4:
            bounds.append(index)
    groups = []
    for start, end in zip(bounds, [*bounds[1:], len(order)], strict=True):
        members = np.sort(order[start:end])
        width = int(num_pages[members].max())
        table = np.full((len(members), width), NULL_PAGE)
        for row, member in enumerate(members):
            table[row, : num_pages[member]] = stretches[member].pages[: num_pages[member]]
        padding = np.arange(width * page_size)[None, :] >= lengths[members][:, None]
        mask = torch.zeros(padding.shape, dtype=dtype, device=device)
        mask.masked_fill_(torch.from_numpy(padding).to(device), -torch.inf)
        rows = None if len(bounds) == 1 else torch.from_numpy(members).to(device)
        groups.append(_DecodeGroup(rows, torch.from_numpy(table).flatten().to(device), mask[:, None, None]))
    return groups
