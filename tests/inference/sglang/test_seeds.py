from __future__ import annotations

from tests.conftest import needs

needs("torch")

import torch  # noqa: E402

from reef.inference.sglang.plugin.reef_sglang.seeds import redraw, uniform  # noqa: E402

KEPT = torch.tensor([0.3, 0.0, 0.5, 0.0, 0.1])  # what filters left


def drawn(seed: int, position: int) -> int:
    token_ids = torch.tensor([7, 7])
    redraw(token_ids, torch.stack([KEPT, KEPT]), torch.tensor([0, position]), {1: seed})
    assert token_ids[0] == 7, "the row has no seed"
    return int(token_ids[1])


def test_draws_follow_what_is_left_and_nothing_else_is_drawn():
    counts = torch.bincount(torch.tensor([drawn(seed, 3) for seed in range(3000)]), minlength=5) / 3000
    assert torch.allclose(counts, KEPT / 0.9, atol=0.03)


def test_each_seed_and_position_has_its_own_number():
    numbers = {uniform(seed, position) for seed in range(30) for position in range(30)}
    assert len(numbers) == 900 and 0 <= min(numbers) < 0.01 and 0.99 < max(numbers) < 1
    assert uniform(5, 3) == uniform(5, 3)
