"""A request with a seed draws the same tokens whatever runs beside it.

SGLang honours `sampling_seed` only in an engine where every request is seeded, and not with min-p. Here the row of a
seeded request is drawn again: its distribution is inverted at a number that is a hash of (seed, position).
"""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakValueDictionary

_SEEDED: WeakValueDictionary[str, Any] = WeakValueDictionary()  # request id -> SGLang's request


def on_arrival(result: None, req: Any, *_: Any, **__: Any) -> None:
    """After `Req.__init__`."""
    if req.sampling_params.sampling_seed is not None:
        _SEEDED[req.rid] = req


def tell_rows(runner: Any, logits_output: Any, forward_batch: Any) -> None:
    """Before `ModelRunner.sample`: row -> seed, for the rows that have one."""
    requests = enumerate(_SEEDED.get(rid) for rid in forward_batch.rids)
    seeds = {row: req.sampling_params.sampling_seed for row, req in requests if req is not None}
    forward_batch.sampling_info.reef_seeds = seeds


def redraw(token_ids: Any, kept: Any, positions: Any, seeds: dict[int, int]) -> None:
    """Overwrite `token_ids` [batch] at the seeded rows. `kept`: probabilities after every filter [batch, vocabulary].

    Always in the vocabulary's order: sorted or not depends on what the other rows of the batch want.
    """
    for row, seed in seeds.items():
        total = kept[row].double().cumsum(-1)
        token_ids[row] = int((total <= uniform(seed, int(positions[row])) * total[-1]).sum())


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1)."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53
