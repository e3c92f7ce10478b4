"""Padding-free packing: every distinct prefix of a micro-batch is computed once.

The sequences of a micro-batch form a tree of tokens: a prompt shared by eight rollouts, a system message shared by all
prompts, an earlier turn repeated by a later one, or the same answer sampled twice each occupy their positions once.
Sorted, the sequences are the tree in depth-first order: each adds what follows its longest common prefix with its
predecessor. Attention runs over blocks, contiguous runs of that order; a block sees the blocks on its way to the root
and, of itself, what its mask allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

DENSE_BLOCK_TOKENS = 192
"""A subtree of at most this many tokens is one block with a mask; a larger one is split where it branches."""

MERGED_BLOCK_TOKENS = 64
"""Adjacent subtrees of at most this many tokens together become one block."""


@dataclass(slots=True, frozen=True)
class TrainedSequence:
    """Token ids with the positions (>= 1) of those to train; `slots` are their places in the step's token vectors."""

    token_ids: Ints  # [num_tokens]
    positions: Ints  # [num_trained], increasing
    slots: Ints  # [num_trained]

    @property
    def inputs(self) -> Ints:
        """What the model must read: all before the last trained token."""
        return self.token_ids[: self.positions[-1]]


@dataclass(slots=True, frozen=True)
class Block:
    """Packed tokens [start, end) that attend to `ancestors` (earlier blocks, root first) and to themselves."""

    start: int
    end: int
    ancestors: tuple[int, ...]
    mask: Bools | None  # [length, length], True where a token sees another of the block; None: causal


@dataclass(slots=True, frozen=True)
class MicroBatch:
    """One forward pass. The head runs at the packed tokens `rows`; trained token t is predicted by row `row[t]`."""

    token_ids: Ints  # [num_packed]
    position_ids: Ints  # [num_packed]
    blocks: list[Block]
    rows: Ints  # [num_rows]
    row: Ints  # [num_trained]
    targets: Ints  # [num_trained]
    slots: Ints  # [num_trained]


def pack(sequences: Sequence[TrainedSequence], budget: int) -> list[MicroBatch]:
    """Split into micro-batches of at most `budget` packed tokens; a longer sequence gets one of its own."""
    ordered = sorted((s for s in sequences if len(s.positions)), key=lambda s: s.inputs.tolist())
    groups: list[list[tuple[TrainedSequence, int]]] = []  # each with its prefix shared with the predecessor
    size = 0
    for sequence in ordered:
        shared = common_prefix(groups[-1][-1][0].inputs, sequence.inputs) if groups else 0
        added = len(sequence.inputs) - shared
        if not groups or size + added > budget:
            groups.append([])
            shared, size, added = 0, 0, len(sequence.inputs)
        groups[-1].append((sequence, shared))
        size += added
    return [_micro_batch(group) for group in groups]


def common_prefix(first: Ints, second: Ints) -> int:
    """Number of leading tokens that two sequences share."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length


def _micro_batch(group: list[tuple[TrainedSequence, int]]) -> MicroBatch:
    paths: list[Ints] = []  # of each sequence: the packed index of each of its tokens
    size = 0
    for sequence, shared in group:
        added = len(sequence.inputs) - shared
        prefix = paths[-1][:shared] if paths else np.empty(0, np.int64)
        paths.append(np.concatenate([prefix, np.arange(size, size + added)]))
        size += added
    token_ids, position_ids = np.empty(size, np.int64), np.empty(size, np.int64)
    for (sequence, _), path in zip(group, paths, strict=True):
        token_ids[path] = sequence.inputs
        position_ids[path] = np.arange(len(path))
    sources = np.concatenate([path[s.positions - 1] for (s, _), path in zip(group, paths, strict=True)])
    rows, row = np.unique(sources, return_inverse=True)
    return MicroBatch(
        token_ids=token_ids,
        position_ids=position_ids,
        blocks=_blocks(paths, [shared for _, shared in group]),
        rows=rows,
        row=row,
        targets=np.concatenate([s.token_ids[s.positions] for s, _ in group]),
        slots=np.concatenate([s.slots for s, _ in group]),
    )


def _blocks(paths: list[Ints], shared: list[int]) -> list[Block]:
    """Cut the tree into blocks, in packed order. `shared[i]` is the common prefix of paths i - 1 and i."""
    blocks: list[Block] = []
    pending: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(paths), 0, ())]
    while pending:
        first, last, depth, ancestors = pending.pop()
        start = int(paths[first][depth])
        end = 1 + max(int(path[-1]) for path in paths[first:last])
        common = min(shared[first + 1 : last], default=len(paths[first]))
        if last - first > 1 and end - start <= DENSE_BLOCK_TOKENS:
            mask = _tree_mask([path[depth:] - start for path in paths[first:last]], end - start)
            blocks.append(Block(start, end, ancestors, mask))
            continue
        if common > depth:
            blocks.append(Block(start, start + common - depth, ancestors, None))
            ancestors = (*ancestors, len(blocks) - 1)
        if last - first > 1:
            cuts = [first, *(i for i in range(first + 1, last) if shared[i] == common), last]
            children = [(a, b) for a, b in pairwise(cuts) if len(paths[a]) > common]
            pending.extend((a, b, common, ancestors) for a, b in reversed(_merge_small(paths, children, common)))
    return blocks


def _merge_small(paths: list[Ints], children: list[tuple[int, int]], depth: int) -> list[tuple[int, int]]:
    """Join adjacent subtrees as long as they stay small: one block then reads their common ancestors once."""
    merged: list[tuple[int, int]] = []
    begin = 0
    for first, last in children:
        end = 1 + max(int(path[-1]) for path in paths[first:last])
        if merged and end - begin <= MERGED_BLOCK_TOKENS:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
            begin = int(paths[first][depth])
    return merged


def _tree_mask(paths: list[Ints], length: int) -> Bools:
    """Which token of a block sees which: those on its own path, up to itself."""
    mask = np.zeros((length, length), np.bool_)
    done = 0
    for path in paths:
        for index in np.flatnonzero(path >= done):
            mask[path[index], path[: index + 1]] = True
        done = max(done, int(path[-1]) + 1)
    return mask


def pack_one(token_ids: Sequence[int]) -> MicroBatch:
    """One sequence of at least two tokens, with every token after the first trained."""
    positions = np.arange(1, len(token_ids))
    return pack([TrainedSequence(np.asarray(token_ids, np.int64), positions, positions - 1)], len(token_ids))[0]
