"""One local Ray for the whole run, started when the first test needs it."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress

import pytest

from reef.runtime.executor import make_executor, process
from reef.runtime.executor.placement import Component, plan
from tests.conftest import needs

STORE_BYTES = 80 * 1024 * 1024


@pytest.fixture(scope="session")
def ray_cluster():
    """Two logical CPUs and two logical devices."""
    needs("ray")
    from reef.runtime.executor.ray_cluster import RayCluster

    cluster = RayCluster(num_cpus=2, num_gpus=2, object_store_bytes=STORE_BYTES)
    cluster.open()
    family = process.marked(f"REEF_LOCAL_RAY={cluster._session.directory}")
    yield cluster
    assert cluster.lost() is None
    cluster.close()
    assert len(family) >= 4 and process.gone(family, 0.0), "the local Ray left something behind"


def _make(request):
    """`make_executor`; with `ray`, in a reservation of its own on the shared Ray. Closes what it made."""
    opened = ExitStack()

    def make(kind, worker_class, kwargs_per_rank, *, name="worker", component=None, **settings):
        if kind == "ray":
            cluster = request.getfixturevalue("ray_cluster")
            from reef.runtime.executor.ray_cluster import RayReservation

            component = component or Component(name=name, workers=len(kwargs_per_rank), cpus=0.5)
            reservation = RayReservation(cluster, plan([component]))
            reservation.open()
            opened.callback(reservation.close)
            settings["reservation"] = reservation
        executor = make_executor(kind, worker_class, kwargs_per_rank, name=name, **settings)
        opened.callback(executor.close, 60.0 if kind == "uni" else 0.5)  # a thread cannot be killed
        return executor

    with opened:
        yield make


make = pytest.fixture(_make)
make_for_module = pytest.fixture(_make, scope="module")


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def gone_soon(pids: list[int], seconds: float = 60.0) -> bool:
    """Sleepers that tests must see end by force sleep for ten minutes, far longer than this waits."""
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)
