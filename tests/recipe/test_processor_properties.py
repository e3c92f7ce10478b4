"""Whatever arrives in whatever order: nothing is consumed twice, nothing trains twice, nothing waits for ever."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from reef.recipe import RecipeConfig
from reef.recipe.processor import ScoredProcessor
from reef.runtime.interfaces import Disposition, Ending
from tests.conftest import examples
from tests.recipe.exchanges import generation, record, report

ENDINGS = (Ending.STOP, Ending.LENGTH, Ending.CLIENT_LEFT, Ending.ENGINE_CUT)
RELEASES = {"r0": 0, "r1": 1, "r2": 2}

records = st.lists(
    st.builds(
        lambda endings, release, status: (endings, release, status),
        st.lists(st.sampled_from(ENDINGS), min_size=0, max_size=3),
        st.sampled_from(list(RELEASES)),
        st.sampled_from((200, 200, 200, 500)),
    ),
    min_size=1,
    max_size=8,
)
reports = st.lists(
    st.fixed_dictionaries(
        {
            "references": st.lists(st.integers(0, 8), min_size=1, max_size=3),
            "score": st.none() | st.sampled_from((0.0, 0.5, 1.0)),
            "group": st.none() | st.sampled_from(("g", "h")),
            "size": st.none() | st.integers(2, 3),
            "choice": st.none() | st.integers(0, 3),
            "step": st.booleans(),
        }
    ),
    max_size=25,
)


def _report(index: int, drawn: dict):
    metadata = {
        "group": drawn["group"],
        "group_size": drawn["size"] if drawn["group"] else None,
        "choice": drawn["choice"],
    }
    references = [f"x{one}" for one in drawn["references"]]
    return report(f"report{index}", *references, score=drawn["score"], at=float(index), sequence=index, **metadata)


@settings(max_examples=examples(100))
@given(records, reports, st.integers(1, 4))
def test_every_id_is_consumed_once_and_trains_once(drawn_records, drawn_reports, batch_size) -> None:
    store = {
        f"x{index}": record(
            f"x{index}",
            *(generation(ending=one) for one in endings),
            release_id=release,
            status=status,
            captured=bool(endings),
        )
        for index, (endings, release, status) in enumerate(drawn_records)
    }
    processor = ScoredProcessor(RecipeConfig(batch_size=batch_size, max_staleness=1, group_wait=5.0), {})
    consumed, trained = [], Counter()

    def step(now: float) -> None:
        batch = processor.build(now)
        assert processor.build(now + 1.0) == batch
        ids = {one.record_id: one.disposition for one in batch.consumed}
        assert len(ids) == len(batch.consumed)
        assert {sample.record_id for sample in batch.samples} == {
            one for one, disposition in ids.items() if one in store and disposition is Disposition.TRAINED
        }
        assert not batch.samples or any(value for sample in batch.samples for value in sample.advantages)
        trained.update({sample.record_id for sample in batch.samples})
        consumed.extend(ids)
        processor.acknowledge(batch)

    for index, drawn in enumerate(drawn_reports):
        consumed += [one.record_id for one in processor.ingest(_report(index, drawn), store)]
        if drawn["step"]:
            consumed += [one.record_id for one in processor.expire(index, float(index), RELEASES)]
            if processor.ready(float(index)):
                step(float(index))

    end = 1000.0
    while (consumed_now := processor.expire(0, end, RELEASES)) or processor.counts()["ready"]:
        consumed += [one.record_id for one in consumed_now]
        step(end)

    assert not [one for one, times in Counter(consumed).items() if times > 1]
    assert all(times == 1 for times in trained.values())
    assert {f"report{index}" for index in range(len(drawn_reports))} <= set(consumed)
    for name in trained:
        assert store[name].status == 200
        assert RELEASES[store[name].release_id] >= 1
        assert any(answer.ending.complete for answer in store[name].generations)
