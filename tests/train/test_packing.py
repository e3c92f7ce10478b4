from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numpy")

from reef.train.torch_backend import packing
from reef.train.torch_backend.packing import MicroBatch, TrainedSequence, pack, pack_one
from tests.conftest import examples


def sequences(rows: list[list[int]], prompt: int = 1) -> list[TrainedSequence]:
    result, size = [], 0
    for row in rows:
        positions = np.arange(prompt, len(row))
        result.append(TrainedSequence(np.array(row), positions, np.arange(size, size + len(positions))))
        size += len(positions)
    return result


def visible(batch: MicroBatch) -> list[set[int]]:
    """For each packed token, the packed tokens that its block lets it attend to."""
    seen: list[set[int]] = []
    for block in batch.blocks:
        before = {i for a in block.ancestors for i in range(batch.blocks[a].start, batch.blocks[a].end)}
        for index in range(block.end - block.start):
            own = range(index + 1) if block.mask is None else np.flatnonzero(block.mask[index])
            seen.append(before | {block.start + int(i) for i in own})
    return seen


def read_back(batch: MicroBatch) -> dict[int, tuple[list[int], int]]:
    """For each slot: the token ids that its prediction sees, in order of position, and the target."""
    seen = visible(batch)
    result = {}
    for row, target, slot in zip(batch.row, batch.targets, batch.slots, strict=True):
        context = sorted(seen[batch.rows[row]], key=lambda i: batch.position_ids[i])
        assert [int(batch.position_ids[i]) for i in context] == list(range(len(context)))
        result[int(slot)] = ([int(batch.token_ids[i]) for i in context], int(target))
    return result


def expected(items: list[TrainedSequence]) -> dict[int, tuple[list[int], int]]:
    return {
        int(slot): (item.token_ids[:position].tolist(), int(item.token_ids[position]))
        for item in items
        for position, slot in zip(item.positions, item.slots, strict=True)
    }


def test_rollouts_of_one_prompt_share_it():
    prompt = list(range(100, 145))
    (batch,) = pack(sequences([prompt + [k] * 8 for k in range(8)], prompt=45), 2048)
    assert len(batch.token_ids) == 45 + 8 * 7  # the last token of a rollout is predicted, never read
    assert len(batch.rows) == 1 + 8 * 7


def test_equal_rollouts_are_computed_once():
    (batch,) = pack(sequences([[1, 2, 3, 4]] * 5), 100)
    assert len(batch.token_ids) == 3
    assert sorted(batch.slots) == list(range(15))


def test_a_later_turn_contains_the_earlier_one():
    turn = [1, 2, 3, 4]
    (batch,) = pack(sequences([[*turn, 9, 8, 7], turn]), 100)
    assert len(batch.token_ids) == 6


def test_a_micro_batch_stays_within_its_budget():
    rows = [[p, *range(20), k, k] for p in range(4) for k in range(6)]
    batches = pack(sequences(rows), 40)
    assert all(len(batch.token_ids) <= 40 for batch in batches)
    assert sorted(slot for batch in batches for slot in batch.slots) == list(range(24 * 22))


def test_a_long_sequence_goes_alone():
    batches = pack(sequences([[1, 2], list(range(50)), [3, 4]]), 10)
    assert sorted(len(batch.token_ids) for batch in batches) == [2, 49]


def test_what_follows_the_last_trained_token_is_not_read():
    sequence = TrainedSequence(np.arange(30), np.array([5, 9]), np.array([0, 1]))
    (batch,) = pack([sequence], 100)
    assert batch.token_ids.tolist() == list(range(9))
    assert batch.rows.tolist() == [4, 8]


def test_pack_one_trains_every_token_after_the_first():
    batch = pack_one([5, 6, 7])
    assert (batch.token_ids.tolist(), batch.targets.tolist(), batch.slots.tolist()) == ([5, 6], [6, 7], [0, 1])


def test_blocks_cover_the_packed_tokens_in_order():
    rows = [[0] * 300 + [p] * 200 + [k] * 100 for p in (1, 2) for k in (3, 4)]
    (batch,) = pack(sequences(rows), 10_000)
    assert [(b.start, b.end, b.ancestors, b.mask is None) for b in batch.blocks] == [
        (0, 300, (), True),
        (300, 500, (0,), True),
        (500, 599, (0, 1), True),
        (599, 698, (0, 1), True),
        (698, 898, (0,), True),
        (898, 997, (0, 4), True),
        (997, 1096, (0, 4), True),
    ]


def test_small_subtrees_are_masked_blocks():
    rows = [[0] * 300 + [p] * 20 + [k] * 10 for p in (1, 2) for k in (3, 4)]
    (batch,) = pack(sequences(rows), 10_000)
    assert [(b.start, b.end, b.ancestors, b.mask is None) for b in batch.blocks] == [
        (0, 300, (), True),
        (300, 338, (0,), False),
        (338, 376, (0,), False),
    ]


def test_rollouts_after_a_long_prompt_are_one_block():
    (batch,) = pack(sequences([[0] * 300 + [k] * 8 for k in range(1, 9)], prompt=300), 10_000)
    assert [(b.start, b.end, b.ancestors) for b in batch.blocks] == [(0, 300, ()), (300, 356, (0,))]


@pytest.mark.parametrize(("dense", "merged"), [(0, 0), (3, 0), (3, 3), (4, 2), (1000, 64)])
@given(rows=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=12))
@settings(max_examples=examples(75))
def test_every_prediction_sees_exactly_its_own_prefix(dense, merged, rows):
    items = sequences(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "DENSE_BLOCK_TOKENS", dense)
        patch.setattr(packing, "MERGED_BLOCK_TOKENS", merged)
        batches = pack(items, 15)
    found: dict[int, tuple[list[int], int]] = {}
    for batch in batches:
        found |= read_back(batch)
    assert found == expected(items)
