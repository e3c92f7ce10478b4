"""A deployment's way up and down: what is checked, in which order things start, and that everything is closed."""

from __future__ import annotations

import pytest

from reef.errors import ConfigError, EngineError, ReefError, StorageError
from reef.runtime.coordinator import Coordinator
from reef.runtime.deployment import find_factory
from tests.runtime.fakes import FakeEngines, FakeTrainer, Faults, plan_of


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def coordinator(tmp_path, faults):
    return Coordinator(plan_of(tmp_path, FakeEngines(faults), FakeTrainer(faults)))


def test_building_allocates_nothing(coordinator, faults):
    assert faults.calls == []


def test_the_way_up_and_down(coordinator, faults):
    coordinator.start()
    assert faults.calls[0] == "open resources"
    assert sorted(faults.calls[1:3]) == ["start engines", "start trainer"]
    assert faults.calls[3:] == ["attach trainer", "attach engines"]
    faults.calls.clear()
    coordinator.close()
    assert sorted(faults.calls[:2]) == ["close engines", "close trainer"]
    assert faults.calls[2:] == ["close resources"]


def test_components_that_share_no_transfer_are_refused_before_anything_is_allocated(tmp_path, faults, monkeypatch):
    monkeypatch.setattr(FakeEngines, "accepted_transfers", ("rdma", "nccl"))
    coordinator = Coordinator(plan_of(tmp_path, FakeEngines(faults), FakeTrainer(faults)))
    with pytest.raises(ConfigError, match="the trainer sends by disk, the engines receive by rdma, nccl"):
        coordinator.start()
    assert faults.calls == []


def test_without_a_trainer_nothing_is_transferred(tmp_path, faults):
    coordinator = Coordinator(plan_of(tmp_path, FakeEngines(faults), None))
    coordinator.start()
    coordinator.close()
    assert faults.calls == ["open resources", "start engines", "close engines", "close resources"]


@pytest.mark.parametrize(
    "failing", ["open resources", "start engines", "start trainer", "attach trainer", "attach engines"]
)
def test_a_failed_start_closes_what_it_opened_and_says_what_failed(coordinator, faults, failing):
    faults.plant(failing, EngineError("no"))
    faults.plant("close engines", StorageError("nor this"))
    with pytest.raises(EngineError, match="no"):
        coordinator.start()
    assert faults.calls[-1] == "close resources"
    started = [call.removeprefix("start") for call in faults.calls if call.startswith("start ")]
    assert [call.removeprefix("close") for call in faults.calls if call.startswith("close ")][:-1] == started[::-1]


def test_a_failing_close_hides_neither_the_later_ones_nor_the_first_error(coordinator, faults):
    coordinator.start()
    faults.plant("close engines", StorageError("first"))
    faults.plant("close resources", StorageError("second"))
    with pytest.raises(ReefError, match="could be closed: first"):
        coordinator.close()
    assert {"close trainer", "close engines", "close resources"} <= set(faults.calls)


def test_sessions_leave_nothing_behind(coordinator, tmp_path):
    coordinator.start()
    coordinator.close()
    assert list((tmp_path / "transfer").iterdir()) == []


def make_pair(config, foundation):
    raise AssertionError("found, not called")


def test_a_factory_is_found_by_path():
    assert find_factory("tests.runtime.test_plan:make_pair", {}) is make_pair


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("locale", "must be local, or package.module:name, got 'locale'"),
        ("nowhere:build", "cannot load nowhere:build: ModuleNotFoundError"),
        ("reef.errors:gone", "cannot load reef.errors:gone: AttributeError"),
        ("reef.errors:HTTP_STATUS", "must be callable, got tuple"),
    ],
)
def test_a_factory_that_cannot_be_used_is_a_configuration_error(name, message):
    with pytest.raises(ConfigError, match="execution.runtime.*" + message):
        find_factory(name, {"local": make_pair})


def test_a_factory_is_found_by_entry_point(tmp_path, monkeypatch):
    package = tmp_path / "plugin-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[reef.runtimes]\nmine = tests.runtime.test_plan:make_pair\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_factory("mine", {}) is make_pair
