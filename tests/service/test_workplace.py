from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from reef.errors import ConfigError
from reef.inference.local.config import LocalConfig
from reef.runtime.config import ExecutionConfig
from reef.runtime.executor import MpExecutor
from reef.runtime.executor.placement import Component
from reef.service.config import NoTraining
from reef.service.workplace import Workplace
from reef.train.torch_backend.config import TorchConfig

ENGINE = LocalConfig(model_path="model", engines=2)


class FakeExecutor(MpExecutor):
    """A class that a deployment could bring."""


def workplace(execution, training=None, inference=ENGINE, data=Path("data")):
    return Workplace(execution, inference, training or NoTraining(), data)


def test_a_class_of_ones_own_is_found_before_anything_starts(tmp_path):
    own = workplace(ExecutionConfig(executor="tests.service.test_workplace:FakeExecutor"), data=tmp_path)
    own.open()
    assert type(own.executor("engine", "tests.executor.workers:Counter", [{}])) is FakeExecutor
    own.close()
    with pytest.raises(
        ConfigError, match=r"execution.executor: cannot load nowhere:Executor: ModuleNotFoundError: No module"
    ):
        workplace(ExecutionConfig(executor="nowhere:Executor")).open()


def test_auto_without_a_cluster_is_mp(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    auto = workplace(ExecutionConfig(executor="auto"), data=tmp_path)
    auto.open()
    assert type(auto.executor("engine", "tests.executor.workers:Counter", [{}])) is MpExecutor
    auto.close()


def test_each_worker_asks_for_what_its_device_says():
    place = workplace(ExecutionConfig(executor="ray", cpus_per_worker=2), TorchConfig(device="cpu"))
    assert place._components(0) == [
        Component(name="engine", workers=2, cpus=2, gpus=0, here=True),
        Component(name="trainer", workers=1, cpus=2, gpus=0),
    ]
    assert [one.gpus for one in place._components(4)] == [1, 0], "auto takes a device where there is one"
    cuda = msgspec.structs.replace(ENGINE, device="cuda")
    assert [one.gpus for one in workplace(ExecutionConfig(executor="ray"), inference=cuda)._components(0)] == [1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"executor": "threads"}, "executor must be one of auto, mp, uni, ray or package.module:Class, got 'threads'"),
        ({"ray_address": "head:1"}, "ray-address is for the executors ray and auto, got 'head:1' with executor mp"),
        (
            {"executor": "ray", "ray_address": "ray://head:10001"},
            "ray-address must be host:port or \"auto\", got 'ray://head:10001'",
        ),
        ({"executor": "ray", "ray_address": "head"}, "ray-address must be host:port or \"auto\", got 'head'"),
    ],
)
def test_bad_settings_name_field_and_value(settings, message):
    with pytest.raises(ValueError) as caught:
        ExecutionConfig(**settings)
    assert str(caught.value) == message
