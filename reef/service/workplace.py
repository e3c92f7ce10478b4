"""Where one deployment's workers run: opens what its kind of executor needs, and makes the executors."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from reef.errors import ConfigError
from reef.inference.local.config import LocalConfig
from reef.inference.sglang.config import SGLangConfig
from reef.records.lock import DirectoryLock
from reef.runtime.config import ExecutionConfig
from reef.runtime.coordinator import Resources
from reef.runtime.executor import executor_class, make_executor, resolve_kind
from reef.runtime.executor.placement import Component, plan
from reef.runtime.interfaces import Executor
from reef.service.config import NoTraining
from reef.train.torch_backend.config import PROCESS_ENVIRONMENT, TorchConfig

log = logging.getLogger("reef.service")

ENGINE, TRAINER = "engine", "trainer"


class Workplace(Resources):
    """Executors may be made from `open` to `close`, for the components `engine` and `trainer`."""

    def __init__(
        self,
        execution: ExecutionConfig,
        inference: LocalConfig | SGLangConfig,
        training: NoTraining | TorchConfig,
        data: Path,
    ) -> None:
        self._execution = execution
        self._inference = inference
        self._training = training
        self._logs = data / "logs"
        self._lock = DirectoryLock(data, "coordinator.lock")
        self._kind = resolve_kind(execution.executor, execution.ray_address)
        self._options: dict[str, Any] = {}  # of the executor's class
        self._opened = ExitStack()

    @property
    def data_plane_host(self) -> str:
        """Where engines listen: "" is a Unix socket, "node" whatever address their node has."""
        kind = self._execution.data_plane
        if kind == "auto":
            elsewhere = self._kind == "ray" and bool(ray_address(self._execution))
            kind = "tcp" if elsewhere or self._execution.runtime == "coordinator_training" else "unix"
        return "node" if kind == "tcp" else ""

    def open(self) -> None:
        """Find the executor's class; with `ray`, connect and reserve. Blocks. Raises ReefError.

        A data directory has one coordinator at a time: its marker describes one set of engines.
        """
        executor_class(self._kind)
        self._lock.acquire()
        self._opened.callback(self._lock.release)
        if self._kind == "ray":
            self._open_ray()

    def executor(self, name: str, worker: str, kwargs_per_rank: Sequence[Mapping[str, Any]]) -> Executor:
        return make_executor(
            self._kind,
            worker,
            kwargs_per_rank,
            name=name,
            env_per_rank=[PROCESS_ENVIRONMENT] * len(kwargs_per_rank),
            log_directory=self._logs,
            start_timeout=self._execution.start_timeout,
            **self._options,
        )

    def close(self) -> None:
        """After the executors: leave the cluster, or stop it if it is ours. Blocks."""
        self._opened.close()

    def _open_ray(self) -> None:
        from reef.runtime.executor.ray_cluster import RayCluster, RayReservation

        execution, address = self._execution, ray_address(self._execution)
        needed = cpus_needed(execution, self._inference, self._training)
        with ExitStack() as opened:
            cluster = RayCluster(address, num_cpus=needed)
            cluster.open()
            opened.callback(cluster.close)
            components = self._components(cluster.devices)
            shared = not isinstance(self._training, NoTraining) and self._training.colocate
            wanted = sum(one.workers * one.gpus for one in components)
            if wanted > cluster.devices and not shared:
                raise ConfigError(
                    f"engines and trainer want {wanted:g} devices and the Ray cluster has {cluster.devices}: "
                    "set training.colocate to let them share, or inference.device and training.device to cpu"
                )
            reservation = RayReservation(
                cluster, plan(components, colocate=shared), name="workers", timeout=min(120.0, execution.start_timeout)
            )
            reservation.open()
            opened.callback(reservation.close)
            self._options = {"reservation": reservation}
            self._opened.push(opened.pop_all())
        where = f"the cluster at {address}" if address else "a local cluster of its own"
        log.info("workers run on Ray, on %s%s", where, ", on shared devices" if shared else "")

    def _components(self, devices: int) -> list[Component]:
        here = not self.data_plane_host  # a Unix socket is reached on its machine only
        return _components(self._execution, self._inference, self._training, devices, here)


def ray_address(execution: ExecutionConfig) -> str:
    """Of the cluster to join; empty: a local one."""
    return execution.ray_address or os.environ.get("RAY_ADDRESS", "")


def cpus_needed(
    execution: ExecutionConfig,
    inference: LocalConfig | SGLangConfig,
    training: NoTraining | TorchConfig,
    *more: Component,
) -> int:
    """How many a local Ray must have."""
    components = [*_components(execution, inference, training, 0, True), *more]
    return math.ceil(sum(one.workers * one.cpus for one in components))


def _components(
    execution: ExecutionConfig,
    inference: LocalConfig | SGLangConfig,
    training: NoTraining | TorchConfig,
    devices: int,
    here: bool,
) -> list[Component]:
    cpus = execution.cpus_per_worker
    trainers = []
    if not isinstance(training, NoTraining):
        trainers = [Component(name=TRAINER, workers=1, cpus=cpus, gpus=_gpus(training.device, devices))]
    if isinstance(inference, SGLangConfig):  # its engines are processes of the coordinator's machine
        return trainers
    gpus = _gpus(inference.resolved_device, devices)
    engines = Component(name=ENGINE, workers=inference.engines, cpus=cpus, gpus=gpus, here=here)
    return [engines, *trainers]


def _gpus(device: str, devices: int) -> float:
    """Devices of one worker. Ray hides every device from a worker that asks for none."""
    return 1.0 if device == "cuda" or (device == "auto" and devices > 0) else 0.0
