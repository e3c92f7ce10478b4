"""What Ray adds: whose cluster it is, where workers sit, and that they are gone when they should be."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from reef.errors import ReefError, WorkerDied
from reef.runtime.executor import make_executor
from reef.runtime.executor.placement import Component, plan
from tests.conftest import needs
from tests.executor.conftest import alive, gone_soon

COUNTER = "tests.executor.workers:Counter"


@pytest.fixture
def reserve(ray_cluster):
    from reef.runtime.executor.ray_cluster import RayReservation

    reservations = []

    def reserve(*components, colocate=False, timeout=120.0):
        reservation = RayReservation(ray_cluster, plan(components, colocate=colocate), timeout=timeout)
        reservations.append(reservation)
        reservation.open()
        return reservation

    yield reserve
    for reservation in reservations:
        reservation.close()


def started(name, workers, reservation, worker=COUNTER):
    executor = make_executor("ray", worker, [{}] * workers, name=name, reservation=reservation)
    executor.start()
    return executor


def devices(executor):
    return [future.result(60) for future in executor.collective_rpc("environment", "CUDA_VISIBLE_DEVICES")]


def test_disjoint_components_have_devices_of_their_own_and_colocated_ones_share(reserve):
    engine, trainer = (Component(name=name, workers=1, cpus=0.5, gpus=1) for name in ("engine", "trainer"))
    for colocate, expected in ((False, [["0"], ["1"]]), (True, [["0"], ["0"]])):
        reservation = reserve(engine, trainer, colocate=colocate)
        executors = [started(name, 1, reservation) for name in ("engine", "trainer")]
        assert [devices(executor) for executor in executors] == expected
        for executor in executors:
            executor.close()
        reservation.close()


def test_ranks_are_in_order_of_devices(reserve):
    executor = started("engine", 2, reserve(Component(name="engine", workers=2, cpus=0, gpus=1)))
    assert devices(executor) == ["0", "1"]
    executor.close()


def test_a_reservation_that_does_not_fit_says_what_is_wanted_and_what_there_is(reserve):
    wanted = r"3 x engine \(0.5 CPUs, 1 GPUs\): it has 2 CPUs, 2 GPUs, of which .* are free"
    with pytest.raises(ReefError, match=wanted):
        reserve(Component(name="engine", workers=3, cpus=0.5, gpus=1), timeout=0.5)


def test_every_process_is_gone_when_close_returns_and_the_seats_can_be_taken_again(reserve):
    reservation = reserve(Component(name="engine", workers=1, cpus=0.5, gpus=1))
    for worker in ("tests.executor.workers:Stubborn", COUNTER):
        executor = started("engine", 1, reservation, worker)
        pids = executor.pids
        if worker == COUNTER:
            executor.rpc(0, "sleep", 600)
        executor.close(0.2)
        assert len(pids) == 1 and not alive(pids[0])


def test_nothing_is_restarted_or_sent_twice(reserve, tmp_path):
    executor = started("engine", 1, reserve(Component(name="engine", workers=1, cpus=0.5)))
    with pytest.raises(WorkerDied):
        executor.rpc(0, "note_and_die", str(tmp_path / "notes")).result(60)
    time.sleep(1.0)
    assert (tmp_path / "notes").read_text() == "here\n"
    with pytest.raises(WorkerDied):
        executor.rpc(0, "add").result(60)
    executor.close()


def test_an_actor_has_a_name_and_is_gone_from_it_after_close(reserve, ray_cluster):
    import ray

    executor = started("engine", 1, reserve(Component(name="engine", workers=1, cpus=0.5)))
    named = ray.get_actor("engine-0", namespace=ray_cluster.namespace)
    assert ray.get(named.where.remote(), timeout=60)[1].pid == executor.pids[0]
    second = make_executor("ray", COUNTER, [{}], name="engine", reservation=executor._reservation, start_timeout=0.2)
    with pytest.raises(WorkerDied, match=r"engine-0 could not start: .*already taken"):
        second.start()
    second.close()
    executor.close()
    with pytest.raises(ValueError, match="engine-0"):
        ray.get_actor("engine-0", namespace=ray_cluster.namespace)


def test_a_connection_that_is_there_is_borrowed_and_left_alone(ray_cluster):
    import ray

    from reef.runtime.executor.ray_cluster import RayCluster

    second = RayCluster()
    second.open()
    assert ray_cluster.owned and not second.owned
    second.close()
    assert ray.is_initialized()
    with pytest.raises(
        ReefError, match=r"cluster at 192\.0\.2\.99:6379 cannot be used: .*connected to the Ray cluster at"
    ):
        RayCluster("192.0.2.99:6379").open()
    assert ray.is_initialized()


BORROWER = """
import os, sys, time
from reef.runtime.executor import make_executor
from reef.runtime.executor.placement import Component, plan
from reef.runtime.executor.ray_cluster import RayCluster, RayReservation
cluster = RayCluster(sys.argv[1])
cluster.open()
reservation = RayReservation(cluster, plan([Component(name="engine", workers=2, cpus=1.0, here=True)]))
executors = [make_executor("ray", "tests.executor.workers:" + worker, [{}] * n, name="engine", reservation=reservation)
             for worker, n in (("Counter", 2),)]
for executor in executors:
    executor.start()
assert not cluster.owned
executors[0].rpc(0, "sleep", 600)
print(*executors[0].pids, executors[0].rpc(1, "directory").result(60), flush=True)
if sys.argv[2:] == ["leave"]:
    executors[0].close(0.5)
    reservation.close()
    cluster.close()
else:
    time.sleep(600)
"""


@pytest.mark.parametrize("leave", [True, False])
def test_workers_on_a_borrowed_cluster_die_with_their_owner_and_the_cluster_lives(reserve, tmp_path, leave):
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", BORROWER, address, *(["leave"] if leave else [])]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as owner:
        *pids, directory = owner.stdout.readline().split()
        pids = [int(pid) for pid in pids]
        assert len(pids) == 2 and directory == str(tmp_path)
        if leave:
            assert owner.wait(60) == 0
        else:
            assert all(alive(pid) for pid in pids)
            owner.kill()
    assert gone_soon(pids, 0.0 if leave else 60.0)
    free = {}
    deadline = time.monotonic() + 60
    while free.get("CPU") != 2 and time.monotonic() < deadline:  # what was reserved is free again
        time.sleep(0.1)
        free = ray.available_resources()
    assert free["CPU"] == 2


OWNER = """
import os, signal, sys, time
from reef.runtime.executor import make_executor, process
executor = make_executor("ray", "tests.executor.workers:Counter", [{}], name="engine")
heard = []
executor.on_failure(heard.append)
executor.start()
cluster, reservation = executor._cluster, executor._reservation
assert cluster.owned
mark = f"REEF_LOCAL_RAY={cluster._session.directory}"
first = process.marked(mark)
os.kill(process.named(mark, ["raylet"])["raylet"].pid, signal.SIGKILL)
while not heard:
    time.sleep(0.05)
executor = make_executor("ray", "tests.executor.workers:Counter", [{}], name="engine", reservation=reservation)
executor.start()
assert process.gone(first, 60)
assert executor.rpc(0, "add").result(60) == 1
family = process.marked(f"REEF_LOCAL_RAY={cluster._session.directory}")
untitled = [one for one in family if b"SPT_NOENV=1" not in open(f"/proc/{one.pid}/environ", "rb").read()]
assert not untitled, "their titles may cover the mark"
print("OWNER", cluster._session.directory, executor.pids[0], *(one.pid for one in family), file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_a_local_ray_that_dies_is_replaced_and_it_ends_with_its_owner():
    needs("ray")
    with subprocess.Popen([sys.executable, "-c", OWNER], stderr=subprocess.PIPE, text=True) as owner:
        directory, *family = next(line for line in owner.stderr if line.startswith("OWNER")).split()[1:]
        actor, *others = [int(pid) for pid in family]
        assert len(others) >= 4  # head, agent, the agent's two helpers
        owner.kill()
    assert gone_soon([actor, *others])
    shutil.rmtree(directory)


def test_a_cluster_that_is_not_there_is_an_error_with_its_address():
    needs("ray")
    code = """
from reef.runtime.executor.ray_cluster import RayCluster
RayCluster("127.0.0.1:1", open_timeout=1).open()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ReefError: the Ray cluster at 127.0.0.1:1 cannot be used: not ready within 1 s" in done.stderr


def test_an_actor_killed_by_somebody_else_is_dead(reserve, ray_cluster):
    import ray

    executor = started("engine", 1, reserve(Component(name="engine", workers=1, cpus=0.5)))
    pending = executor.rpc(0, "sleep", 600)
    ray.kill(ray.get_actor("engine-0", namespace=ray_cluster.namespace))
    with pytest.raises(WorkerDied, match=r"engine-0 \(pid \d+\) died: it was killed by `ray.kill`"):
        pending.result(60)
    executor.close()


def test_a_paused_actor_only_makes_its_caller_wait(reserve):
    executor = started("engine", 1, reserve(Component(name="engine", workers=1, cpus=0.5)))
    os.kill(executor.pids[0], signal.SIGSTOP)
    future = executor.rpc(0, "add")
    with pytest.raises(TimeoutError):
        future.result(1.5)
    os.kill(executor.pids[0], signal.SIGCONT)
    assert future.result(60) == 1 and executor.health() is None
    os.kill(executor.pids[0], signal.SIGSTOP)
    pids = executor.pids
    executor.close(0.2)
    assert not alive(pids[0])


@pytest.fixture
def other_node(ray_cluster):
    """A second node with three CPUs, on this machine; ended by its pid."""
    import ray

    address = ray.get_runtime_context().gcs_address
    arguments = ["start", f"--address={address}", "--num-cpus=3", "--num-gpus=0", "--block", "--disable-usage-stats"]
    arguments.append("--object-store-memory=80000000")
    command = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as node:
        deadline = time.monotonic() + 120
        while ray.cluster_resources().get("CPU") != 5:
            assert time.monotonic() < deadline and node.poll() is None
            time.sleep(0.1)
        try:
            yield next(one["NodeID"] for one in ray.nodes() if one["Resources"].get("CPU") == 3)
        finally:
            node.terminate()
            node.wait(60)
            while any(one["Alive"] and one["Resources"].get("CPU") == 3 for one in ray.nodes()):
                assert time.monotonic() < deadline + 60
                time.sleep(0.1)


def test_a_worker_on_another_node_is_confirmed_gone_and_an_engine_there_is_refused(reserve, other_node):
    reservation = reserve(Component(name="trainer", workers=1, cpus=3))
    assert reservation.seats("trainer")[0].place.node == other_node
    executor = started("trainer", 1, reservation)
    executor.rpc(0, "sleep", 600)
    pids = executor.pids
    executor.close(0.2)
    assert len(pids) == 1 and not alive(pids[0])
    reservation.close()
    with pytest.raises(ReefError, match=r"engine-0 was placed on the node .* but must run on this one"):
        reserve(Component(name="engine", workers=1, cpus=3, here=True))
