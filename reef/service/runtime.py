"""Finds and assembles the pair of runtimes that a configuration names; nothing is started or allocated here.

::

    execution.runtime      the coordinator runs                    engines and trainer run
    local                  inside the service                      on `execution.executor`
    executor_training      in a worker of `execution.executor`     on `execution.executor`, owned by the coordinator
    ray_training           in a Ray actor                          in Ray actors, owned by the coordinator
    coordinator_training   as `reef coordinator`, somewhere        on that one's `execution.executor`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec

from reef.inference.headers import load_header_provider
from reef.inference.sglang.config import SGLangConfig
from reef.named import load_subclass
from reef.runtime.coordinator import Coordinator
from reef.runtime.deployment import Channel, CoordinatorRuntime, EngineRuntime, LocalChannel, find_factory
from reef.runtime.executor import make_executor
from reef.runtime.executor.placement import Component, plan
from reef.runtime.interfaces import Executor, InferenceHandler, InferenceRuntime, TrainingRuntime
from reef.runtime.remote import Discovery, RemoteChannel, read_discovery
from reef.service.config import ReefConfig
from reef.service.coordinator import COORDINATOR, HOST, HostedChannel, discovery_path
from reef.service.plan import Foundation, build_plan, managed
from reef.service.workplace import cpus_needed, ray_address

HANDLERS = {
    "local": "reef.inference.local.client:LocalHandler",
    "sglang": "reef.inference.sglang.client:SGLangHandler",
}

Pair = tuple[TrainingRuntime, InferenceRuntime]


def build_runtimes(config: ReefConfig, foundation: Foundation) -> Pair:
    """The pair that `execution.runtime` names, not started. Raises ConfigError."""
    return find_factory(config.execution.runtime, FACTORIES)(config, foundation)


def pair(channel: Channel, config: ReefConfig) -> Pair:
    inference = EngineRuntime(channel, partial(make_handler, config))
    return CoordinatorRuntime(channel, inference), inference


def make_handler(config: ReefConfig, endpoints: Callable[[], Sequence[str]]) -> InferenceHandler:
    """Raises ConfigError for a handler-factory that leads to no handler, or a handler-config that it refuses."""
    inference = managed(config)
    path = inference.handler_factory or HANDLERS[inference.backend]
    kind = load_subclass("inference.handler-factory", path, InferenceHandler)
    handler: InferenceHandler = kind.from_config(inference.handler_config, endpoints)
    if isinstance(inference, SGLangConfig):
        handler.header_provider = load_header_provider(inference.header_providers)
    return handler


# ---------------------------------------------------------------------------------------------- kinds


def connect_local_runtimes(config: ReefConfig, foundation: Foundation) -> Pair:
    """The coordinator lives in this process."""
    return pair(LocalChannel(Coordinator(build_plan(config, foundation))), config)


def connect_executor_runtimes(config: ReefConfig, foundation: Foundation) -> Pair:
    """The coordinator in a worker of `execution.executor`, which this service owns."""
    return pair(HostedChannel(partial(_coordinator_executor, config, foundation), lambda opened: None), config)


def _coordinator_executor(config: ReefConfig, foundation: Foundation, **options: Any) -> Executor:
    """An executor, not started, whose only worker is the coordinator."""
    return make_executor(
        config.execution.executor,
        HOST,
        [{"config": config}],
        name=COORDINATOR,
        log_directory=foundation.data / "logs",
        start_timeout=config.execution.start_timeout,
        **options,
    )


def connect_ray_runtime(config: ReefConfig, foundation: Foundation) -> Pair:
    """The coordinator in a Ray actor, which makes Ray actors of engines and trainer; all of them die with this process.

    On a cluster with an address they may be on other machines than this one.
    """
    address = ray_address(config.execution)
    host = "0.0.0.0" if address else config.execution.coordinator_host
    execution = msgspec.structs.replace(config.execution, executor="ray", ray_address=address, coordinator_host=host)
    inner = msgspec.structs.replace(config, execution=execution)
    reserved: list[Any] = []

    def open_ray(opened: ExitStack) -> None:
        from reef.runtime.executor.ray_cluster import RayCluster, RayReservation

        own = Component(name=COORDINATOR, workers=1, cpus=execution.cpus_per_worker)
        cluster = RayCluster(address, num_cpus=cpus_needed(inner.execution, managed(inner), inner.training, own))
        cluster.open()
        opened.callback(cluster.close)
        reservation = RayReservation(cluster, plan([own]), timeout=min(120.0, execution.start_timeout))
        reservation.open()
        opened.callback(reservation.close)
        reserved.append(reservation)

    def make() -> Executor:
        return _coordinator_executor(inner, foundation, reservation=reserved[-1])

    return pair(HostedChannel(make, open_ray), config)


def connect_coordinator_runtimes(config: ReefConfig, foundation: Foundation) -> Pair:
    """A coordinator that runs already; it is borrowed, and goes on when the service ends."""
    path = discovery_path(config)

    async def find() -> Discovery:
        return await asyncio.to_thread(read_discovery, path)

    return pair(RemoteChannel(find), config)


FACTORIES = {
    "local": connect_local_runtimes,
    "executor_training": connect_executor_runtimes,
    "ray_training": connect_ray_runtime,
    "coordinator_training": connect_coordinator_runtimes,
}
