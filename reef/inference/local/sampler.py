"""From logits to tokens, for the whole batch at once.

Order: repetition, presence and frequency penalties, bias, grammar, temperature, then min-p, top-k and top-p, each on
what the one before left.
Randomness is one uniform number per (request seed, position of the token), so a request draws the same numbers
whatever runs beside it. Its logits, though, are sums whose order may depend on the batch: where two tokens' cumulative
probabilities touch within float noise (about 1e-6 of draws in float32) the outcome may differ.
Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reef.runtime.interfaces import SamplingParams

_CANDIDATES = 512
"""Top-p looks at this many of the most likely tokens first, and sorts all only if they do not hold enough."""


@dataclass(slots=True, frozen=True)
class Row:
    """What sampling needs of one sequence. `output_counts` [V] is None without penalties, `allowed` without grammar."""

    params: SamplingParams
    seed: int
    position: int  # of the token to sample, from the start of the prompt
    prompt_ids: list[int]
    output_counts: npt.NDArray[np.int32] | None
    allowed: npt.NDArray[np.bool_] | None = None  # [V]; others are never drawn


@dataclass(slots=True, frozen=True)
class Sampled:
    """Lists of B. `logprobs` are under the model at temperature 1, `sampled_logprobs` as drawn (0 when greedy)."""

    token_ids: list[int]
    logprobs: list[float]
    sampled_logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]


def sample(logits: Tensor, rows: Sequences[Row]) -> Sampled:
    """Sample one token from each row of `logits` [B, V]."""
    logits = logits.float()
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    adjusted = _adjust(logits, rows)
    tokens, drawn = _choose(adjusted, rows)
    chosen = logits.gather(1, tokens[:, None]) - log_total
    packed = torch.stack((tokens.double(), chosen[:, 0].double(), drawn.double())).tolist()
    token_ids = [int(token) for token in packed[0]]
    return Sampled(token_ids, packed[1], packed[2], _top_logprobs(logits, log_total, rows))


def uniform(seeds: Sequences[int], positions: Sequences[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): two rounds of the SplitMix64 finalizer (Steele et al. 2014)."""
    state = np.asarray([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        state = _mix(state + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state + np.asarray(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    numbers: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _adjust(logits: Tensor, rows: Sequences[Row]) -> Tensor:
    """Apply penalties, bias and grammar; the logits themselves when no row has any."""
    touched = [
        index
        for index, row in enumerate(rows)
        if row.output_counts is not None or row.params.logit_bias or row.allowed is not None
    ]
    if not touched:
        return logits
    logits = logits.clone()
    for index in touched:
        row, params = rows[index], rows[index].params
        if row.output_counts is not None:
            _penalize(logits[index], row)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
            logits[index].index_add_(0, ids, bias)
        if row.allowed is not None:
            logits[index].masked_fill_(torch.from_numpy(~row.allowed).to(logits.device), -torch.inf)
    return logits


def _penalize(logits: Tensor, row: Row) -> None:
    """In place. Repetition covers prompt and output (arXiv 1909.05858); the others cover the output (OpenAI API)."""
    assert row.output_counts is not None
    params = row.params
    used = np.flatnonzero(row.output_counts)
    if params.repetition_penalty != 1.0:
        seen = np.union1d(used, row.prompt_ids)
        ids = torch.from_numpy(seen).to(logits.device)
        old = logits[ids]
        logits[ids] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(used):
        cost = params.presence_penalty + params.frequency_penalty * row.output_counts[used]
        ids = torch.from_numpy(used).to(logits.device)
        logits[ids] -= torch.from_numpy(cost).to(logits.device, logits.dtype)


def _choose(logits: Tensor, rows: Sequences[Row]) -> tuple[Tensor, Tensor]:
    """Tokens [B] and the log-probabilities they were drawn with [B]."""
    drawing = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if not drawing:
        return logits.argmax(dim=-1), logits.new_zeros(len(rows))
    if len(drawing) == len(rows):
        return _draw(logits, rows)
    tokens, drawn = logits.argmax(dim=-1), logits.new_zeros(len(rows))
    index = torch.tensor(drawing, device=logits.device)
    tokens[index], drawn[index] = _draw(logits[index], [rows[row] for row in drawing])
    return tokens, drawn


def _draw(logits: Tensor, rows: Sequences[Row]) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution at each row's number; every row has a temperature above 0."""
    temperature = torch.tensor([row.params.temperature for row in rows], device=logits.device)[:, None]
    # The maximum is subtracted first: dividing by a tiny temperature could overflow.
    weights = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature).exp_()  # [B, V], the largest is 1
    _truncate(weights, rows)
    numbers = torch.from_numpy(uniform([row.seed for row in rows], [row.position for row in rows]))
    tokens, total = _invert(weights, numbers.to(logits.device))
    return tokens, (weights.gather(1, tokens[:, None])[:, 0] / total).log()


def _invert(weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] where the running sum of `weights` [B, V] passes `numbers` [B] of its total, and the totals [B].

    In two levels, blocks and then inside one block, because a running sum over all of V is slow. In double precision,
    so that a token of weight zero is never drawn.
    """
    block = 128
    batch, vocab = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocab % block)) if vocab % block else weights
    blocks = padded.view(batch, -1, block)
    sums = blocks.sum(dim=-1).double().cumsum(dim=-1)
    totals = sums[:, -1:]
    goals = numbers[:, None] * totals
    which = torch.searchsorted(sums, goals, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(which > 0, sums.gather(1, (which - 1).clamp_(min=0)), 0.0)
    inside = blocks.gather(1, which[:, :, None].expand(-1, -1, block))[:, 0].double().cumsum(dim=-1)
    # Rounding may leave the goal at or past the end of its block: then it is the block's last token with weight.
    goals = torch.minimum(goals - before, inside[:, -1:] * (1 - 1e-12))
    offset = torch.searchsorted(inside, goals, right=True)
    # Without finite weights (the engine cuts such a request) the search runs past the end.
    return (which * block + offset)[:, 0].clamp_(max=vocab - 1), totals[:, 0].float()


def _truncate(weights: Tensor, rows: Sequences[Row]) -> None:
    """Set the weights that min-p, top-k and top-p exclude to zero, in place. `weights` [B, V] have maximum 1."""
    min_p = [row.params.min_p for row in rows]
    if any(min_p):
        weights.masked_fill_(weights < torch.tensor(min_p, device=weights.device)[:, None], 0.0)
    vocab = weights.shape[1]
    top_k = [row.params.top_k if 0 < row.params.top_k < vocab else vocab for row in rows]
    top_p = [row.params.top_p if row.params.top_p < 1.0 else torch.inf for row in rows]
    cut = [index for index in range(len(rows)) if top_k[index] < vocab or top_p[index] < 1.0]
    if cut:
        limits = torch.tensor([[top_k[index], top_p[index]] for index in cut], device=weights.device)
        count = max(top_k[index] if top_k[index] < vocab else min(_CANDIDATES, vocab) for index in cut)
        weights[cut] = _keep_largest(weights[cut], limits[:, :1], limits[:, 1:], count)


def _keep_largest(weights: Tensor, top_k: Tensor, top_p: Tensor, count: int) -> Tensor:
    """Of each row keep the top_k largest, and of those the fewest that hold top_p of their sum, but at least one.

    Looks at the `count` largest, and again at all of them if top-p needs more. `top_k` and `top_p` are [B, 1].
    """
    vocab = weights.shape[1]
    largest, ids = weights.topk(count)
    largest.masked_fill_(torch.arange(count, device=weights.device) >= top_k, 0.0)
    running = largest.cumsum(dim=-1)
    goal = top_p * torch.where(top_k < vocab, running[:, -1:], weights.sum(dim=-1, keepdim=True))
    if count < vocab and bool(((running[:, -1:] < goal) & goal.isfinite() & (top_k >= vocab)).any()):
        return _keep_largest(weights, top_k, top_p, vocab)
    kept = running - largest < goal
    kept[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, ids, largest * kept)


def _top_logprobs(logits: Tensor, log_total: Tensor, rows: Sequences[Row]) -> list[list[tuple[int, float]]]:
    wanted = [min(row.params.top_logprobs, logits.shape[1]) for row in rows]
    if not any(wanted):
        return [[] for _ in rows]
    index = [row for row, count in enumerate(wanted) if count]
    values, ids = (logits[index] - log_total[index]).topk(max(wanted))
    found: list[list[tuple[int, float]]] = [[] for _ in rows]
    for row, row_ids, row_values in zip(index, ids.tolist(), values.tolist(), strict=True):
        found[row] = list(zip(row_ids, row_values, strict=True))[: wanted[row]]
    return found
