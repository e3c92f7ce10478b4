"""`GET /metrics`: what was counted in this process, and what can be seen now, in Prometheus' text format."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from reef import __version__
from reef.metrics import REGISTRY, scenario_label
from reef.runtime.interfaces import EngineReport
from reef.service.gateway import Gateway


async def metrics(request: Request) -> Response:
    """`GET /metrics`"""
    gateway = Gateway.of(request)
    engines = await gateway.deployment.engines()
    in_flight = request.app.state.observer.in_flight
    seen = [*_gateway(gateway, in_flight), *_engines(engines), *_prefixes(engines)]
    body = await asyncio.to_thread(_write, seen, gateway.deployment.data)
    return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})


def _write(seen: list[Metric], data: Path) -> bytes:
    """Blocks: asks the operating system."""
    free = shutil.disk_usage(data).free
    disk = GaugeMetricFamily("reef_disk_free_bytes", "Free where the data directory is.", free)
    registry = CollectorRegistry()
    registry.register(_Snapshot([*seen, disk]))
    return generate_latest(REGISTRY) + generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gateway(gateway: Gateway, in_flight: int) -> Iterator[Metric]:
    deployment = gateway.deployment
    info = GaugeMetricFamily("reef_info", "The version and the model that is served.", labels=["version", "model"])
    info.add_metric([__version__, deployment.models()[0]], 1)
    yield info
    yield GaugeMetricFamily("reef_requests_in_flight", "HTTP requests that are not over.", in_flight)
    yield GaugeMetricFamily("reef_generations_in_flight", "Requests that an engine works for.", gateway.in_flight)
    yield GaugeMetricFamily("reef_trains", "1 in the process that trains, of those on one database.", deployment.trains)
    scenarios = deployment.scenarios()
    yield GaugeMetricFamily("reef_scenarios", "Scenarios that this process serves.", len(scenarios))
    heads = GaugeMetricFamily("reef_head_number", "Number of the release that is served.", labels=["scenario"])
    for scenario in scenarios:
        if (label := scenario_label(scenario.name)) == scenario.name:
            heads.add_metric([label], scenario.head.number)
    yield heads


def _engines(engines: Sequence[EngineReport]) -> Iterator[Metric]:
    for name, text in {
        "running": "Sequences that are being generated.",
        "waiting": "Sequences in the queue.",
        "free_pages": "Pages of the KV cache that nothing uses.",
        "total_pages": "Pages of the KV cache.",
        "paused": "1 while a publication holds the engine.",
    }.items():
        family = GaugeMetricFamily(f"reef_engine_{name}", text, labels=["engine"])
        for engine in engines:
            family.add_metric([engine.engine], getattr(engine, name))
        yield family


def _prefixes(engines: Sequence[EngineReport]) -> Iterator[Metric]:
    """Counted by the engines since their start; scenarios beyond the named ones are summed."""
    totals: dict[tuple[str, str], int] = {}
    for engine in engines:
        for lane, use in engine.prefixes.items():
            for name, number in asdict(use).items():
                key = name, scenario_label(lane) if lane else ""
                totals[key] = totals.get(key, 0) + number
    for name, text in {
        "prompt_tokens": "Prompt tokens that engines admitted.",
        "hit_tokens": "Of these, found in the prefix cache.",
        "hit_bytes": "Keys and values that hits made unnecessary to compute.",
        "recomputed_tokens": "Computed again, because a publication or want of pages had dropped them.",
    }.items():
        family = CounterMetricFamily(f"reef_prefix_{name}", text, labels=["scenario"])
        for (of, scenario), number in totals.items():
            if of == name:
                family.add_metric([scenario], number)
        yield family


ROUTES = [Route("/metrics", metrics, methods=["GET"])]
