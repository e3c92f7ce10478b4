"""Slots of the engines: who keeps one, who gives it up, who is refused one, and what nobody else notices of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.artifact.content import DirectoryContentStore
from reef.errors import EngineError, EngineUncertain, Unavailable
from reef.runtime.interfaces import (
    BASE_LOAD_ID,
    Candidate,
    Objective,
    PauseMode,
    Release,
    ReleaseKind,
    StepSignal,
    TrainJob,
    WeightKind,
    WeightLoad,
)
from reef.runtime.publication import Publication
from reef.runtime.recovery import MarkerFile
from reef.runtime.residency import Residency
from reef.runtime.scheduler import TrainingCoordinator
from tests.runtime.fakes import FakeEngines, FakeTrainer, Faults


class Many:
    """Several scenarios on engines with few slots. Loads are numbered in order; `heads` are the committed releases."""

    def __init__(self, path: Path, names: str, slots: int) -> None:
        self.path = path
        self.faults = Faults()
        self.engines = FakeEngines(self.faults, slots)
        self.contents = DirectoryContentStore(path / "artifacts")
        self.publication = Publication(self.engines, self.contents, PauseMode.IN_PLACE, "base", list(range(8)))
        self.coordinator = TrainingCoordinator(
            FakeTrainer(self.faults), self.publication, self.contents, MarkerFile(path / "marker.json")
        )
        self.heads = {name: self._release(name, 0, "base", BASE_LOAD_ID) for name in names}
        self.number = 0
        self.coordinator.recover(list(self.heads.values()), False)

    def _release(self, name: str, number: int, content: str, load: str) -> Release:
        return Release(
            release_id=f"{name}{number}",
            scenario=name,
            number=number,
            parent_id=None,
            kind=ReleaseKind.TRAINED,
            content_id=content,
            runtime_load_id=load,
            created_at=0.0,
        )

    def _load(self) -> str:
        self.number += 1
        return f"engine:{self.number}"

    def train(self, name: str) -> Candidate:
        head, load = self.heads[name], self._load()
        job = TrainJob(
            job_id=f"job-{load}",
            scenario=name,
            step=1,
            signal=StepSignal(objective=Objective("policy_gradient"), samples=[]),
            incumbent_path=None if head.content_id == "base" else str(self.contents.path(head.content_id)),
            state_path=None,
            output_path=str(self.path / load),
            probe_ids=list(range(8)),
        )
        return self.coordinator.train(job, load)

    def publish(self, candidate: Candidate) -> Release:
        self.coordinator.publish(candidate)
        name = candidate.scenario
        release = self._release(name, self.heads[name].number + 1, candidate.content_id, candidate.runtime_load_id)
        self.heads[name] = release
        self.coordinator.acknowledge(candidate.job_id, release)
        return release

    def learn(self, name: str) -> Release:
        return self.publish(self.train(name))

    def roll_back(self, name: str, content: str) -> Release:
        load = self._load()
        candidate = Candidate(
            job_id=f"job-{load}",
            scenario=name,
            content_id=content,
            state_id=None,
            kind=WeightKind.LORA,
            runtime_load_id=load,
            probe_logprobs=[],
            incumbent_probe_logprobs=[],
            origin=ReleaseKind.ROLLBACK,
        )
        return self.publish(self.coordinator.adopt(candidate))

    def states(self) -> dict[str, str]:
        return {one["runtime_load_id"]: one["state"] for one in self.publication.residency()["loads"]}

    def check(self) -> None:
        """What holds whenever nothing is in flight."""
        assert not self.engines.paused
        assert self.engines.lanes == {name: head.runtime_load_id for name, head in self.heads.items()}
        assert set(self.engines.lanes.values()) <= set(self.engines.loads)
        assert len(set(self.engines.loads.values()) - {"base"}) <= self.engines.slots
        assert set(self.states()) == set(self.engines.loads) - {BASE_LOAD_ID}


def test_older_releases_stay_until_their_slot_is_needed_and_the_oldest_goes_first(tmp_path):
    many = Many(tmp_path, "ab", slots=4)
    many.learn("a")
    many.learn("b")
    many.learn("a")
    assert many.states() == {"engine:1": "unused", "engine:2": "current", "engine:3": "current"}
    many.learn("b")
    assert many.states()["engine:2"] == "unused" and "evict" not in many.faults.calls
    many.learn("a")
    assert many.states().keys() == {"engine:2", "engine:3", "engine:4", "engine:5"}, "engine:1 was unused for longest"
    many.check()


def test_a_candidate_is_pinned_and_a_load_in_use_is_not_evicted(tmp_path):
    many = Many(tmp_path, "ab", slots=3)
    many.learn("a")
    many.learn("a")
    many.engines.in_use = {"engine:1"}
    candidate = many.train("b")
    assert many.states() == {"engine:1": "unused", "engine:2": "current", "engine:3": "pinned"}
    many.publish(candidate)
    with pytest.raises(EngineError, match=r"engine:4 finds no slot: all 3 \(inference.max-loads\)"):
        many.train("a")
    many.coordinator.reject("job-engine:4", "no slot")
    many.check()
    many.engines.in_use = set()
    many.learn("a")
    assert "engine:1" not in many.states()
    many.check()


def test_what_is_pinned_keeps_its_slot_whoever_asks_for_it(tmp_path):
    residency = Residency(FakeEngines(Faults(), slots=1))
    loads = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(name)
        path = str(tmp_path / name)
        loads.append(WeightLoad(runtime_load_id=name, content_id=name, kind=WeightKind.LORA, path=path))
    residency.stage(loads[0], (), pin=True)
    with pytest.raises(EngineError, match="two finds no slot"):
        residency.stage(loads[1], ())
    residency.release("one", None, ())
    residency.stage(loads[1], ())
    assert [load["runtime_load_id"] for load in residency.status({})["loads"]] == ["two"]


def test_a_load_that_failed_takes_no_slot(tmp_path):
    many = Many(tmp_path, "ab", slots=3)
    many.learn("a")
    for _ in range(3):
        many.faults.plant("stage", EngineError("corrupt"))
        with pytest.raises(EngineError, match="corrupt"):
            many.train("b")
        many.coordinator.reject(f"job-engine:{many.number}", "corrupt")
        assert many.publication.residency()["used"] == 1 and many.states() == {"engine:1": "current"}
    many.learn("b")
    many.check()


def test_a_load_of_which_nobody_knows_whether_it_is_there_counts_until_it_is_freed(tmp_path):
    many = Many(tmp_path, "a", slots=2)
    many.faults.plant("stage", EngineUncertain("no answer"))
    with pytest.raises(EngineUncertain):
        many.train("a")
    assert many.states() == {"engine:1": "leaked"}
    many.coordinator.reject("job-engine:1", "no answer")
    assert many.states() == {}


@pytest.mark.parametrize("operation", ["drop", "evict"])
def test_a_failed_unload_stays_visible_and_is_tried_again_first(tmp_path, operation):
    many = Many(tmp_path, "a", slots=3)
    many.learn("a")
    many.learn("a")
    if operation == "drop":
        candidate = many.train("a")
        many.faults.plant("drop", EngineError("stuck"))
        many.coordinator.reject(candidate.job_id, "worse")
        leaked = "engine:3"
    else:
        many.learn("a")
        many.faults.plant("evict", EngineError("stuck"))
        many.learn("a")
        leaked = "engine:1"
    assert many.states()[leaked] == "leaked"
    (seen,) = [one for one in many.publication.residency()["loads"] if one["runtime_load_id"] == leaked]
    assert seen["error"] == "stuck"
    many.learn("a")
    assert leaked not in many.states() and leaked not in many.engines.loads
    many.check()


def test_a_scenario_too_many_is_refused_by_name_and_the_others_go_on(tmp_path):
    many = Many(tmp_path, "abc", slots=3)
    many.learn("a")
    many.learn("b")
    with pytest.raises(Unavailable, match=r"scenario 'c' .* inference.max-loads \(3\) .* 2 others have them \(a, b\)"):
        many.train("c")
    marker = many.coordinator.marker()
    assert marker is not None and marker.job_id == "job-engine:2", "nothing of the refused job exists"
    many.learn("a")
    many.learn("b")
    many.check()
    many.roll_back("a", "base")
    assert many.engines.lanes["a"] != BASE_LOAD_ID and many.publication.residency()["used"] == len(
        set(many.engines.loads.values()) - {"base"}
    )
    many.learn("c")
    with pytest.raises(Unavailable, match="scenario 'a'"):
        many.train("a")
    many.check()


def test_a_rollback_shares_the_slot_of_the_bytes_that_are_there(tmp_path):
    many = Many(tmp_path, "a", slots=2)
    first = many.learn("a")
    many.learn("a")
    many.roll_back("a", first.content_id)
    assert "evict" not in many.faults.calls and many.publication.residency()["used"] == 2
    assert many.engines.loads["engine:3"] == first.content_id
    assert many.states() == {"engine:2": "unused", "engine:3": "current"}, "two IDs for the same bytes serve nobody"
    many.learn("a")
    assert many.states() == {"engine:3": "unused", "engine:4": "current"}
    many.check()


def test_full_weights_are_freed_at_once(tmp_path, monkeypatch):
    many = Many(tmp_path, "a", slots=4)
    load_of = many.publication.load_of

    def full(*args):
        load = load_of(*args)
        load.kind = WeightKind.FULL
        return load

    monkeypatch.setattr(many.publication, "load_of", full)
    many.learn("a")
    many.learn("a")
    assert set(many.engines.loads) == {BASE_LOAD_ID, "engine:2"} and many.states() == {"engine:2": "current"}


def test_replaced_engines_get_every_head_under_its_own_load_id(tmp_path):
    many = Many(tmp_path, "abc", slots=4)
    first = many.learn("a")
    many.learn("b")
    many.learn("a")
    many.roll_back("a", first.content_id)  # an alias
    before = dict(many.engines.lanes)
    assert before == {"a": "engine:4", "b": "engine:2", "c": BASE_LOAD_ID}
    many.coordinator.repair_engines()
    assert many.engines.lanes == before and set(many.engines.loads) == {BASE_LOAD_ID, "engine:2", "engine:4"}
    assert many.engines.loads["engine:4"] == first.content_id
    many.check()
    many.learn("b")
    many.check()


STEPS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(("learn", "reject", "roll back", "restart")),
        st.sampled_from((None, None, "stage", "evict", "drop")),
        st.sets(st.integers(1, 20).map("engine:{}".format), max_size=2),
    ),
    max_size=25,
)


@given(plan=STEPS)
def test_whatever_happens_every_head_serves_and_no_slot_is_lost(plan, tmp_path_factory):
    many = Many(tmp_path_factory.mktemp("many"), "abc", slots=3)
    history: dict[str, list[str]] = {name: ["base"] for name in "abc"}
    for name, wish, fault, in_use in plan:
        many.engines.in_use = in_use
        if fault is not None:
            many.faults.plant(fault, EngineError("planted"))
        try:
            if wish == "restart":
                many.coordinator.repair_engines()
            elif wish == "roll back":
                many.roll_back(name, history[name][0])
            else:
                candidate = many.train(name)
                if wish == "reject":
                    many.coordinator.reject(candidate.job_id, "worse")
                else:
                    history[name].append(many.publish(candidate).content_id)
        except Unavailable:
            pass
        except EngineError:
            many.engines.in_use = set()
            many.coordinator.reject(f"job-engine:{many.number}", "refused")
            if wish == "restart":
                many.coordinator.repair_engines()
        many.faults._planted.clear()
        many.check()
