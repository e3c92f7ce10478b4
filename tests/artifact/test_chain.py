from __future__ import annotations

from dataclasses import replace

import pytest

from reef.artifact import chain
from reef.errors import Conflict, NotFound
from reef.runtime.interfaces import Candidate, Evaluation, Release, ReleaseKind, WeightKind

BASE = chain.base_release("s", "base", 1.0)


def candidate(
    content: str, job: str, origin: ReleaseKind = ReleaseKind.TRAINED, source: str | None = None
) -> Candidate:
    return Candidate(
        job_id=job,
        scenario="s",
        content_id=content,
        state_id=f"state of {content}",
        kind=WeightKind.LORA,
        runtime_load_id=f"engine:{job}",
        probe_logprobs=[-1.0, -2.0],
        incumbent_probe_logprobs=[-1.5, -2.5],
        origin=origin,
        source_release_id=source,
        metrics={"loss": 0.5},
    )


class History:
    """A chain that grows."""

    def __init__(self) -> None:
        self.releases = [BASE]

    @property
    def head(self) -> Release:
        return self.releases[-1]

    def train(self, content: str) -> Release:
        return self._add(candidate(content, f"job{len(self.releases)}"))

    def serve_again(self, source: Release, origin: ReleaseKind = ReleaseKind.ROLLBACK) -> Release:
        return self._add(candidate(source.content_id, f"job{len(self.releases)}", origin, source.release_id))

    def roll_back(self) -> Release:
        return self.serve_again(self.target())

    def target(self, release_id: str | None = None) -> Release:
        return chain.rollback_target(self.releases[::-1], self.head, release_id)

    def _add(self, addition: Candidate) -> Release:
        self.releases.append(chain.next_release(self.head, addition, Evaluation(), 2.0))
        return self.head


def test_base_release():
    assert (BASE.number, BASE.parent_id, BASE.kind, BASE.runtime_load_id) == (0, None, ReleaseKind.BASE, "engine:0")
    assert BASE.release_id != chain.base_release("t", "base", 1.0).release_id


def test_next_release_continues_the_chain():
    release = chain.next_release(BASE, candidate("c", "7"), Evaluation(scores={"mean": 0.5}), 2.0)
    assert release == Release(
        release_id=release.release_id,
        scenario="s",
        number=1,
        parent_id=BASE.release_id,
        kind=ReleaseKind.TRAINED,
        content_id="c",
        runtime_load_id="engine:7",
        created_at=2.0,
        state_id="state of c",
        job_id="7",
        metrics={"loss": 0.5, "evaluation": {"mean": 0.5}, "probe_logprobs": [-1.0, -2.0]},
    )


def test_the_same_decision_has_the_same_release_id():
    one, later = (chain.next_release(BASE, candidate("c", "7"), Evaluation(), at) for at in (2.0, 3.0))
    assert one.release_id == later.release_id
    others = [
        chain.next_release(BASE, candidate("d", "7"), Evaluation(), 2.0),
        chain.next_release(BASE, candidate("c", "8"), Evaluation(), 2.0),
        chain.next_release(one, candidate("c", "7"), Evaluation(), 2.0),
    ]
    assert len({one.release_id, *(other.release_id for other in others)}) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"scenario": "t"},
        {"origin": ReleaseKind.BASE},
        {"origin": ReleaseKind.ROLLBACK},  # of what?
        {"source_release_id": "x"},  # but trained
    ],
)
def test_a_candidate_that_does_not_fit_is_refused(wrong):
    with pytest.raises(ValueError, match=r"candidate|base|source_release_id"):
        chain.next_release(BASE, replace(candidate("c", "7"), **wrong), Evaluation(), 2.0)


def test_rollback_goes_one_version_back():
    history = History()
    first = history.train("one")
    history.train("two")
    assert history.target() == first


def test_rolling_back_again_goes_on_instead_of_undoing():
    history = History()
    first = history.train("one")
    history.train("two")
    history.train("three")
    history.roll_back()
    assert history.target() == first
    history.roll_back()
    assert history.target() == BASE
    history.roll_back()
    with pytest.raises(Conflict, match="nothing to roll back to"):
        history.target()


def test_training_after_a_rollback_returns_to_what_was_rolled_back_to():
    history = History()
    first = history.train("one")
    history.train("bad")
    history.roll_back()
    history.train("better")
    assert history.target() == first


def test_a_rollback_skips_versions_with_the_same_content():
    history = History()
    history.train("one")
    history.serve_again(history.head, ReleaseKind.PROMOTED)
    assert history.target() == BASE


def test_a_base_alone_has_nothing_before_it():
    with pytest.raises(Conflict, match="nothing to roll back to"):
        History().target()


def test_a_named_release_is_the_target():
    history = History()
    first, second = history.train("one"), history.train("two")
    back = history.roll_back()
    assert history.target(second.release_id) == second
    assert history.target(BASE.release_id) == BASE
    with pytest.raises(Conflict, match="already"):
        history.target(first.release_id)
    with pytest.raises(Conflict, match="already"):
        history.target(back.release_id)
    with pytest.raises(NotFound, match="unknown"):
        history.target("unknown")


def test_naming_a_rollback_means_what_it_served():
    history = History()
    history.train("one")
    back = history.roll_back()
    history.train("two")
    assert history.target(back.release_id) == BASE


def test_a_history_with_holes_is_reported():
    history = History()
    history.train("one")
    history.train("two")
    with pytest.raises(NotFound, match="missing from the history"):
        chain.rollback_target([history.head], history.head)
