"""The connection to Ray, and the one placement group in which a deployment's workers sit.

A cluster named by its address is borrowed: Reef joins, reserves what it needs and leaves; it never stops one. Without
an address Reef starts a local one, owns it, and stops it with everything in it.

Hazards, each of which cost somebody a day:
- Ray binds the life of a local cluster to the *thread* that started it (the kernel's parent-death signal is sent when a
  thread ends), and installs a SIGTERM handler when that is the main thread. So a thread of its own starts, keeps and
  stops it.
- A process that cannot reach the cluster's head for 60 seconds is terminated by Ray. If a borrowed cluster goes away
  for good, the service ends with it; a local one that died is replaced before that.
- A worker that asks for no device has CUDA_VISIBLE_DEVICES set to nothing: it does not see the devices there are.
- OMP_NUM_THREADS is set to the worker's number of CPUs (1 for less) unless its environment says otherwise. CPUs are
  what Ray counts, nothing it enforces: colocated workers and other programs can still crowd each other.
- Most of Ray's calls start a local cluster where there is no connection; so nothing here calls it after `close`.
- Ray prints its own remarks on deaths to standard output, whatever its logging is told.
- By default Ray starts a worker per CPU in advance, takes 30 % of memory for its object store, kills workers when it
  gets short, and reports its use to its makers; a local one of Reef's does only the first. Every Ray listens on the
  network, and whoever may talk to it runs code: a local one asks for a token that only its processes know.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from reef.directories import OwnedDirectory
from reef.errors import ReefError
from reef.runtime.executor import process
from reef.runtime.executor.lease import Lease
from reef.runtime.executor.placement import Place, Plan, Seat, assign
from reef.runtime.executor.process import Process

log = logging.getLogger("reef.ray")

OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Of a local cluster: what is sent through it is calls, not weights."""

_STOP_SECONDS = 20.0
_KILL_SECONDS = 30.0  # a busy machine takes its time even for this
_PATIENCE_SECONDS = 0.5
_TASK_SECONDS = 30.0  # for a task on another node: its process may have to start first
_VITAL = ("gcs_server", "raylet")
_DIRECTORY_PREFIX = "reef-ray-"
_MARK = "REEF_LOCAL_RAY"  # in the environment of all its processes


class RayCluster:
    """This process's connection to Ray. `open` and `close` may be called again, not at once from two threads.

    Where this process is connected to Ray already, that connection is borrowed too: it stays as it is.
    """

    def __init__(
        self,
        address: str = "",
        *,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        object_store_bytes: int = OBJECT_STORE_BYTES,
        open_timeout: float = 120.0,
    ) -> None:
        """`num_cpus`, `num_gpus` and `object_store_bytes` are a local cluster's; None: what the machine has."""
        self.address = address
        self._local: dict[str, int | None] = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "object_store_memory": object_store_bytes,
        }
        self._open_timeout = open_timeout
        self._session: _Session | None = None
        self._wanted = False  # from `open` to `close`

    def open(self) -> None:
        """Connect, or start a local cluster. Raises ReefError."""
        self._wanted = True
        self._session = session = _Session(self.address, self._local)
        try:
            session.opened.result(self._open_timeout)
        except Exception as error:
            self._leave()
            what = f"the Ray cluster at {self.address}" if self.address else "a local Ray"
            why = f"not ready within {self._open_timeout:g} s" if isinstance(error, TimeoutError) else error
            raise ReefError(f"{what} cannot be used: {why}") from error

    def lost(self, namespace: str = "") -> str | None:
        """Why what was made in `namespace` is of no use any more, or None.

        Knows about a local cluster; of a borrowed one, Ray's own calls have to tell.
        """
        session = self._session
        if session is None:
            return "the connection to Ray is closed"
        if namespace not in ("", session.namespace):
            return "the local Ray it ran on was replaced"
        return session.lost()

    def revive(self) -> bool:
        """Replace a local cluster that is lost; True if that was needed. A borrowed one is not ours to replace."""
        if not self._wanted or (reason := self.lost()) is None:
            return False
        log.warning("%s; it is started again", reason)
        self._leave()
        self.open()
        return True

    @property
    def owned(self) -> bool:
        """True while this object runs a local cluster of its own."""
        return self._session is not None and self._session.directory is not None

    @property
    def namespace(self) -> str:
        """Where the names of actors live; unique to this connection."""
        assert self._session is not None
        return self._session.namespace

    @property
    def devices(self) -> int:
        """How many GPUs the cluster has."""
        return int(ray.cluster_resources().get("GPU", 0))

    def close(self) -> None:
        """Leave a borrowed cluster; stop an owned one. Raises ReefError if a process of an owned one survives."""
        self._wanted = False
        self._leave()

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


class _Session:
    """One connection, on the thread that keeps it alive."""

    def __init__(self, address: str, local: dict[str, int | None]) -> None:
        self._address = address
        self._local = local
        self.namespace = f"reef-{secrets.token_hex(4)}"
        self.directory: Path | None = None  # of a local cluster: its sockets and logs
        self._owned: OwnedDirectory  # that directory
        self._vital: dict[str, Process] = {}  # by program
        self._joined = False
        self.opened: Future[None] = Future()
        self._closing = Event()
        self._lease: Lease | None = None  # on a local cluster
        self._survived = False
        self._thread = Thread(target=self._run, name="ray-owner", daemon=True)
        self._thread.start()

    def lost(self) -> str | None:
        dead = [name for name, one in self._vital.items() if not process.lives(one)]
        return f"the local Ray has lost its {dead[0]}" if dead else None

    def close(self) -> None:
        self._closing.set()
        if self.lost() and self._lease is not None:  # what is left would only be waited for
            self._lease.end()
        # One that never opened may be stuck in Ray's own retries; it leaves by itself when they end.
        self._thread.join(_STOP_SECONDS if self.opened.done() or self.directory is not None else 0.0)
        if self._thread.is_alive() and self._lease is not None:
            self._lease.end()
            self._thread.join(_KILL_SECONDS)
        if self._survived:
            raise ReefError("processes of the local Ray are not gone after SIGKILL")

    def _run(self) -> None:
        try:
            if ray.is_initialized():
                self._join()
            else:
                self._connect()
            self.opened.set_result(None)
            self._closing.wait()
        except BaseException as error:
            self.opened.set_exception(error if isinstance(error, ReefError) else _as_reef_error(error))
        if not self._joined:
            ray.shutdown()
        if self._lease is not None:
            self._survived = not self._lease.end()
            self._owned.remove()

    def _join(self) -> None:
        """Share the connection that this process has."""
        self._joined = True
        connected = ray.get_runtime_context().gcs_address
        if self._address and self._address not in (connected, "auto"):
            raise ReefError(f"this process is connected to the Ray cluster at {connected} already")

    def _connect(self) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)  # it warns of what is chosen here
        common: dict[str, Any] = {"namespace": self.namespace, "log_to_driver": False, "configure_logging": False}
        if self._address:
            ray.init(address=self._address, **common)
            return
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one to the home directory
        self._owned = OwnedDirectory(_DIRECTORY_PREFIX)
        self.directory = self._owned.path
        mark = f"{_MARK}={self.directory}"
        self._lease = Lease(mark)
        # Ray's processes write their titles over what /proc shows of their environment; setproctitle's SPT_NOENV.
        added = {_MARK: str(self.directory), "SPT_NOENV": "1"}
        os.environ.update(added)
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                _temp_dir=str(self.directory),
                _system_config={"memory_monitor_refresh_ms": 0, "worker_register_timeout_seconds": 600},
                **self._local,
                **common,
            )
        finally:
            for name in added:
                del os.environ[name]
        self._vital = process.named(mark, _VITAL)


def _as_reef_error(error: BaseException) -> ReefError:
    return ReefError(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class _Group:
    handle: PlacementGroup
    nodes: dict[int, str]  # bundle -> node id
    seats: dict[str, list[Seat]]


class RayReservation:
    """One placement group on a cluster, with a seat for every worker of the plan's components.

    It is tied to this process: when that dies, Ray frees it, as it ends the actors in it. If this process is an actor,
    Ray frees it only with the driver; therefore one that has a `name` replaces what a predecessor left behind.
    """

    def __init__(self, cluster: RayCluster, planned: Plan, *, name: str = "", timeout: float = 120.0) -> None:
        self.cluster = cluster
        self._plan = planned
        self._name = name
        self._timeout = timeout
        self._group: _Group | None = None
        self._lock = Lock()

    def open(self) -> None:
        """Reserve. Raises ReefError naming what is wanted and what the cluster has, if it has no room in time."""
        here = {f"node:{ray.util.get_node_ip_address()}": 0.001}  # a resource of the nodes with this address
        wanted = [
            {"CPU": bundle.cpus, "GPU": bundle.gpus, **(here if bundle.here else {})} for bundle in self._plan.bundles
        ]
        wanted = [{name: amount for name, amount in one.items() if amount} or {"CPU": 0.001} for one in wanted]
        self._remove_predecessor()
        group = placement_group(wanted, strategy="PACK", name=self._name)
        if not group.wait(self._timeout):
            remove_placement_group(group)
            raise ReefError(
                f"the Ray cluster has no room within {self._timeout:g} s for {_text(self._plan)}: it has "
                f"{_amounts(ray.cluster_resources())}, of which {_amounts(ray.available_resources())} are free"
            )
        try:
            nodes = _nodes(group)
            self._group = _Group(group, nodes, assign(self._plan, _places(self._plan, group, nodes)))
            self._check_here()
        except BaseException:
            self.close()
            raise

    def seats(self, component: str) -> list[Seat]:
        """The component's seats in order of rank, where they are now: a node that dies has its bundles moved."""
        with self._lock:
            if self._group is None or self.cluster.revive():
                self.open()
            group = self._group
            assert group is not None
            if (nodes := _nodes(group.handle)) != group.nodes:
                places = _places(self._plan, group.handle, nodes)
                self._group = group = _Group(group.handle, nodes, assign(self._plan, places))
            return group.seats[component]

    def options(self, seat: Seat) -> dict[str, Any]:
        """What Ray must be told to put an actor or a task there."""
        assert self._group is not None
        return {
            "num_cpus": seat.cpus,
            "num_gpus": seat.gpus,
            "scheduling_strategy": _strategy(self._group.handle, seat.place.index),
        }

    def close(self) -> None:
        """Give everything back; the cluster stays connected."""
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            remove_placement_group(group.handle)

    def _remove_predecessor(self) -> None:
        if self._name:
            with suppress(ValueError):  # there is none
                remove_placement_group(ray.util.get_placement_group(self._name))

    def _check_here(self) -> None:
        """Several nodes can have one address, so the resource above does not settle it."""
        assert self._group is not None
        here = ray.get_runtime_context().get_node_id()
        for one in self._plan.components:
            for rank, seat in enumerate(self._group.seats[one.name]):
                if one.here and seat.place.node != here:
                    raise ReefError(
                        f"{one.name}-{rank} was placed on the node {seat.place.node[:8]} ({seat.place.address}), "
                        f"but must run on this one, {here[:8]}: its data plane is a Unix socket"
                    )


def end_process(node: str, which: Process, seconds: float, *, here: bool) -> bool:
    """End a process, of this node or another, and wait; True once it is gone, as it is when its node is.

    Ray is ending it as well, and takes a SIGKILL that comes first for a failure.
    """
    if here:
        return process.end(which, seconds, _PATIENCE_SECONDS)
    if not ray.is_initialized():
        return False
    task = ray.remote(process.end).options(
        num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )
    try:
        return bool(ray.get(task.remote(which, seconds, _PATIENCE_SECONDS), timeout=seconds + _TASK_SECONDS))
    except ray.exceptions.RayError:
        return not any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())


def _nodes(group: PlacementGroup) -> dict[int, str]:
    found: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return dict(found)


def _places(planned: Plan, group: PlacementGroup, nodes: dict[int, str]) -> list[Place]:
    addresses = {one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes()}
    probes = {}
    for index, bundle in enumerate(planned.bundles):
        if bundle.gpus:
            options = {"num_cpus": 0, "num_gpus": bundle.gpus, "max_retries": 0}
            probes[index] = ray.remote(_device).options(**options, scheduling_strategy=_strategy(group, index)).remote()
    devices = dict(zip(probes, ray.get(list(probes.values()), timeout=_TASK_SECONDS), strict=True))
    return [Place(index, node, addresses.get(node, ""), devices.get(index, "")) for index, node in nodes.items()]


def _device() -> str:
    return ",".join(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def _strategy(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)


def _text(planned: Plan) -> str:
    parts: Sequence[str] = [
        f"{one.workers} x {one.name} ({one.cpus:g} CPUs, {one.gpus:g} GPUs)" for one in planned.components
    ]
    return " and ".join(parts) + (" on the same devices" if planned.colocated else "")


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
