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
    """The memory of the KV cache: [2, layers, pages + 1, kv_heads, P, D]; the first page is NULL_PAGE, always zero.

    What one KV head keeps on one page is contiguous, because that is what attention reads at a time.
    """

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
        shape = (2, num_layers, num_pages + 1, num_kv_heads, page_size, head_dim)
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self._memory = torch.zeros(shape, dtype=dtype, device=device)  # untouched pages cost no memory on a CPU
        self.keys = list(self._memory[0])  # per layer [pages + 1, kv_heads, P, D]
        self.values = list(self._memory[1])

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """K and V on `pages` [B, n] as [B, kv_heads, n * P, D]."""
        keys, values = self.keys[layer], self.values[layer]
        shape = (len(pages), keys.shape[1], pages.shape[1] * self.page_size, keys.shape[3])
        return keys[pages].transpose(1, 2).reshape(shape), values[pages].transpose(1, 2).reshape(shape)

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
    pages: Tensor | None  # [1, pages]; None: nothing precedes these tokens
    length: int  # tokens attended to by the last one
    mask: Tensor | None  # [count, length] added to the scores; None: causal


@dataclass(slots=True, frozen=True)
class _DecodeGroup:
    """Decoding sequences of similar length, padded to the longest."""

    rows: Tensor | None  # [B]; None: all rows that decode
    pages: Tensor  # [B, pages], padded with NULL_PAGE
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


def plan_paged(stretches: list[Stretch], kv: KVTensors, row_tables_up_to: int) -> AttentionPlan:
    """Plan for `stretches` in the order of the flat batch, shorter ones first.

    Those of at most `row_tables_up_to` tokens get row tables; with 0, single tokens are decoded in padded groups.
    """
    slots = _slots(stretches, kv)
    limit = row_tables_up_to or 1
    num_short = sum(stretch.count <= limit for stretch in stretches)
    short, long = stretches[:num_short], stretches[num_short:]
    plan = AttentionPlan(kv, slots, prefills=[_prefill(stretch, kv) for stretch in long])
    if row_tables_up_to:
        plan.rows = _row_tables(short, kv.page_size) if short else None
    else:
        plan.num_decode = num_short
        plan.decodes = _decode_groups(short, kv)
    return plan


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
    """q [T, heads, D], k and v [T, kv_heads, D], which are in the cache already -> [T, heads, D]."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for group in plan.decodes:
        assert plan.kv is not None
        rows = q[: plan.num_decode] if group.rows is None else q.index_select(0, group.rows)
        mixed = _attend_decode(rows, layer, plan.kv, group)
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
        heads_q, heads_k, heads_v = (x[own].transpose(0, 1)[None] for x in (q, k, v))
        if part.pages is not None:
            assert plan.kv is not None
            heads_k, heads_v = (x[:, :, : part.length] for x in plan.kv.gather(layer, part.pages))
        mixed = F.scaled_dot_product_attention(
            heads_q, heads_k, heads_v, attn_mask=part.mask, is_causal=part.mask is None, enable_gqa=True
        )
        out[own] = mixed[0].transpose(0, 1)


def _attend_decode(q: Tensor, layer: int, kv: KVTensors, group: _DecodeGroup) -> Tensor:
    batch, num_heads, head_dim = q.shape
    keys, values = kv.gather(layer, group.pages)
    # The query heads that share a KV head act as that head's queries, so K and V are not repeated.
    grouped = q.reshape(batch, keys.shape[1], -1, head_dim)
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
    return mixed.reshape(batch, num_heads, head_dim)


def _slots(stretches: list[Stretch], kv: KVTensors) -> Tensor:
    page_size = kv.page_size
    parts = []
    for stretch in stretches:
        positions = np.arange(stretch.position, stretch.position + stretch.count)
        first = stretch.position // page_size
        pages = np.asarray(stretch.pages[first : int(positions[-1]) // page_size + 1])
        parts.append(pages[positions // page_size - first] * page_size + positions % page_size)
    return torch.from_numpy(np.concatenate(parts)).to(kv.device)


def _prefill(stretch: Stretch, kv: KVTensors) -> _Prefill:
    length = stretch.position + stretch.count
    if stretch.position == 0:
        return _Prefill(stretch.start, stretch.start + stretch.count, None, length, None)
    pages = torch.tensor([stretch.pages[: -(-length // kv.page_size)]], device=kv.device)
    future = torch.ones(stretch.count, length, dtype=torch.bool, device=kv.device).triu(stretch.position + 1)
    mask = torch.zeros(stretch.count, length, dtype=kv.dtype, device=kv.device).masked_fill_(future, -torch.inf)
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


def _decode_groups(stretches: list[Stretch], kv: KVTensors) -> list[_DecodeGroup]:
    """Group by length so that padding at most doubles what is read."""
    if not stretches:
        return []
    page_size, device = kv.page_size, kv.device
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
        mask = torch.zeros(padding.shape, dtype=kv.dtype, device=device)
        mask.masked_fill_(torch.from_numpy(padding).to(device), -torch.inf)
        rows = None if len(bounds) == 1 else torch.from_numpy(members).to(device)
        groups.append(_DecodeGroup(rows, torch.from_numpy(table).to(device), mask[:, None, None]))
    return groups
