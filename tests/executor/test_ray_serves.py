"""`reef serve` with engine and trainer as actors of a cluster that it borrows: learns, and survives what dies."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.conftest import needs
from tests.executor.conftest import gone_soon

needs("ray", "torch", "transformers", "peft", "openai")

import ray  # noqa: E402

from reef.errors import ConfigError  # noqa: E402
from reef.inference.local.config import LocalConfig  # noqa: E402
from reef.runtime.config import ExecutionConfig  # noqa: E402
from reef.service.workplace import Workplace  # noqa: E402
from reef.train.torch_backend.config import TorchConfig  # noqa: E402
from tests.test_end_to_end import Reef, worst_difference  # noqa: E402


def workers(*names: str) -> dict[str, int]:
    """Process ids of the actors with these names."""
    named = [one for one in ray.util.list_named_actors(all_namespaces=True) if one["name"] in names]
    places = [ray.get_actor(one["name"], namespace=one["namespace"]).where.remote() for one in named]
    return {one["name"]: place[1].pid for one, place in zip(named, ray.get(places, timeout=60), strict=True)}


def wait_for_health(reef: Reef, seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while (answer := reef.http.get("/healthz")).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)


def test_serve_learn_and_survive_on_a_borrowed_cluster(ray_cluster, tiny_model, tmp_path):
    address = ray.get_runtime_context().gcs_address
    flags = {"execution.executor": "auto", "execution.ray-address": address}
    reef = Reef(tiny_model, tmp_path, **flags)
    reef.start()
    try:
        reef.teach()
        _, answer = reef.ask(temperature=0.0)
        os.kill(workers("engine-0")["engine-0"], signal.SIGKILL)
        while reef.http.get("/healthz").status_code == 200:
            time.sleep(0.05)
        wait_for_health(reef)
        assert reef.ask(temperature=0.0)[1] == answer
        reef.teach()
        reef.ask(seed=9)
        worst, loads = worst_difference(reef)
        assert worst < 1e-4 and len(loads) == 3

        pids = list(workers("engine-0", "trainer-0").values())
        assert len(pids) == 2 and not reef.children(), "the service has no worker process of its own"
        os.kill(reef.server.pid, signal.SIGKILL)
        assert gone_soon(pids), "an actor outlived its owner"
    finally:
        reef.server.stop()
    assert ray.get_runtime_context().gcs_address == address and ray_cluster.owned


def test_a_coordinator_in_an_actor_is_replaced(ray_cluster, tiny_model, tmp_path):
    address = ray.get_runtime_context().gcs_address
    flags = {"execution.runtime": "ray_training", "execution.ray-address": address, "execution.cpus-per-worker": 0.5}
    reef = Reef(tiny_model, tmp_path, **flags)
    reef.start()
    try:
        reef.teach()
        _, answer = reef.ask(temperature=0.0)
        before = workers("coordinator-0", "engine-0", "trainer-0")
        assert len(before) == 3 and not reef.children()
        os.kill(before["coordinator-0"], signal.SIGKILL)
        while reef.http.get("/healthz").status_code == 200:
            time.sleep(0.05)
        wait_for_health(reef)
        assert gone_soon(list(before.values())), "a worker outlived its coordinator"
        assert reef.ask(temperature=0.0)[1] == answer
        reef.teach()
        worst, loads = worst_difference(reef)
        assert worst < 1e-4 and len(loads) == 2

        after = list(workers("coordinator-0", "engine-0", "trainer-0").values())
        os.kill(reef.server.pid, signal.SIGKILL)
        assert len(after) == 3 and gone_soon(after), "an actor outlived its owner"
    finally:
        reef.server.stop()


def test_devices_are_shared_only_where_it_is_asked_for(ray_cluster, tmp_path):
    execution = ExecutionConfig(executor="ray", ray_address=ray.get_runtime_context().gcs_address, cpus_per_worker=0.1)
    engines = LocalConfig(model_path="model", device="cuda", engines=2)
    alone = Workplace(execution, engines, TorchConfig(device="cuda"), tmp_path)
    with pytest.raises(ConfigError, match="want 3 devices and the Ray cluster has 2: set training"):
        alone.open()
    alone.close()
    sharing = Workplace(execution, engines, TorchConfig(device="cuda", colocate=True), tmp_path)
    sharing.open()
    sharing.close()
