from __future__ import annotations

import pytest

from reef.errors import StorageError
from reef.runtime.interfaces import Candidate, Marker, MarkerState, WeightKind
from reef.runtime.recovery import MarkerFile, RestartBudget


def marker(state: MarkerState) -> Marker:
    candidate = Candidate(
        job_id="j1",
        scenario="s",
        content_id="c",
        state_id=None,
        kind=WeightKind.LORA,
        runtime_load_id="engine:1",
        probe_logprobs=[-1.5, -0.25],
        incumbent_probe_logprobs=[-1.0, -0.5],
        metrics={"loss": 0.5},
    )
    return Marker(job_id="j1", scenario="s", state=state, updated_at=0.0, candidate=candidate)


def test_marker_survives_a_round_trip(tmp_path):
    file = MarkerFile(tmp_path / "marker.json")
    assert file.read() is None
    written = marker(MarkerState.CHECKPOINT)
    file.write(written)
    assert file.read() == written


def test_marker_refuses_damage_and_says_what_to_do(tmp_path):
    path = tmp_path / "marker.json"
    MarkerFile(path).write(marker(MarkerState.RUNNING))
    path.write_bytes(path.read_bytes().replace(b'"running"', b'"runninh"'))
    with pytest.raises(StorageError, match="move the file away"):
        MarkerFile(path).read()


def test_marker_is_replaced_whole(tmp_path):
    path = tmp_path / "marker.json"
    file = MarkerFile(path)
    file.write(marker(MarkerState.CHECKPOINT))
    (tmp_path / "marker.json.partial").mkdir()  # the next write cannot even begin
    with pytest.raises((StorageError, OSError)):
        file.write(marker(MarkerState.COMPLETE))
    found = file.read()
    assert found is not None and found.state is MarkerState.CHECKPOINT


def test_restart_budget_is_three_with_doubling_delays():
    budget = RestartBudget(limit=3, window=300.0)
    assert [budget.take() for _ in range(4)] == [1.0, 2.0, 4.0, None]
