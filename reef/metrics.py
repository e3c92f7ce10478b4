"""What happens, counted for Prometheus: every instrument that is fed where it happens, in one place.

They belong to the process. What can be looked up when it is asked for (queues, engines, heads) is not here but in
`reef.service.scrape`. Counting must stay cheap: children with labels are looked up once and kept.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each child, which says when it was made

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

NAMED_SCENARIOS = 100
"""Scenarios with series of their own. Clients make scenarios; later ones share the label `other`."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_STEP_SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"reef_{name}", text, labels, registry=REGISTRY)


def _histogram(name: str, text: str, *labels: str, buckets: Iterable[float] = _SECONDS) -> Histogram:
    return Histogram(f"reef_{name}", text, labels, registry=REGISTRY, buckets=tuple(buckets))


REQUESTS = _counter("requests", "HTTP requests that were answered, or left by their client (499).", "route", "status")
REQUEST_SECONDS = _histogram("request_seconds", "From the head of a request to the last byte of its answer.", "route")
FIRST_TOKEN_SECONDS = _histogram("first_token_seconds", "From the head of a request to its first tokens.", "route")
TOKENS = _counter("tokens", "Tokens of recorded answers; cached ones are among the prompt's.", "scenario", "kind")
ANSWERS = _counter("answers", "Recorded answers (choices) by how they ended.", "ending")
ERRORS = _counter("errors", "Requests that were refused or failed, by kind.", "error")

APPEND_SECONDS = _histogram("append_seconds", "From the hand-over of a record until it is durable.")
APPENDED_BYTES = _counter("appended_bytes", "Bytes of records as they are stored.")
GROUP_SIZE = _histogram(
    "commit_group_size", "Operations made durable by one transaction.", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
)
WAITING_WRITES = Gauge("reef_waiting_writes", "Operations that wait for their transaction.", registry=REGISTRY)

TRAINING_SECONDS = _histogram("training_seconds", "From a batch to a staged candidate.", buckets=_STEP_SECONDS)
STEPS = _counter("training_steps", "Batches by what became of them.", "scenario", "outcome")
CONSUMED = _counter("consumed_records", "Answers and reports that never train again.", "scenario", "disposition")
STALENESS = _histogram(
    "staleness_releases",
    "Releases between an answer and the head that it trained, one observation for each trained answer.",
    buckets=(0, 1, 2, 3, 5, 8, 13, 21, 34),
)
PUBLICATIONS = _counter("publications", "Releases that this process committed.", "scenario", "kind")
PAUSE_SECONDS = _histogram("publication_pause_seconds", "For which a publication held the engines.")
RESTARTS = _counter("component_restarts", "Components that died and were replaced.", "component")


@cache
def answers(ending: str) -> Counter:
    return ANSWERS.labels(ending)


@cache
def first_token(route: str) -> Histogram:
    """`route` is one of ours, not what a client sent."""
    return FIRST_TOKEN_SECONDS.labels(route)


_scenarios: dict[str, str] = {}
_tokens: dict[str, tuple[Counter, Counter, Counter]] = {}


def scenario_label(name: str) -> str:
    """The name for the first scenarios of this process, `other` for those after them."""
    if name not in _scenarios and len(_scenarios) >= NAMED_SCENARIOS:
        return "other"
    return _scenarios.setdefault(name, name)


def count_tokens(scenario: str, prompt: int, completion: int, cached: int) -> None:
    """Tokens of one recorded exchange, over all of its choices."""
    label = scenario_label(scenario)
    children = _tokens.get(label)
    if children is None:
        kinds = ("prompt", "completion", "cached")
        first, second, third = (TOKENS.labels(label, kind) for kind in kinds)
        children = _tokens[label] = (first, second, third)
    children[0].inc(prompt)
    children[1].inc(completion)
    if cached:
        children[2].inc(cached)


def count_consumed(scenario: str, dispositions: Iterable[str]) -> None:
    for disposition, number in Tally(dispositions).items():
        CONSUMED.labels(scenario_label(scenario), disposition).inc(number)
