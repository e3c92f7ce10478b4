"""Section `execution`: where coordinator, engines and trainer run. Importing this imports nothing heavy."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from reef.runtime.executor import KINDS, is_class_path


class ExecutionConfig(
    msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename=lambda name: name.replace("_", "-")
):
    """Section `execution`: where workers run."""

    runtime: Annotated[
        str,
        msgspec.Meta(
            description="where the coordinator of training and publication runs. local: inside the service; "
            "executor_training: in a process of its own; ray_training: as a Ray actor; coordinator_training: a "
            '"reef coordinator" that runs already; or the name of an installed entry point, or package.module:factory',
            min_length=1,
        ),
    ] = "local"
    executor: Annotated[
        str,
        msgspec.Meta(
            description="mp: engine and trainer in processes of their own; uni: inside the coordinator; ray: as Ray "
            "actors; auto: ray where a cluster's address is known, else mp; or package.module:Class of your own"
        ),
    ] = "mp"
    ray_address: Annotated[
        str,
        msgspec.Meta(
            description="host:port of a Ray cluster that this machine has joined; empty: RAY_ADDRESS, "
            "or a local Ray that lives as long as the service"
        ),
    ] = ""
    cpus_per_worker: Annotated[
        float,
        msgspec.Meta(
            ge=0, description="ray: CPUs reserved for each engine and trainer; it gets as many threads (>= 1)"
        ),
    ] = 1.0
    start_timeout: Annotated[float, msgspec.Meta(gt=0, description="Seconds that a component may take to start")] = (
        600.0
    )
    coordinator: Annotated[
        str,
        msgspec.Meta(
            description="coordinator_training: the file in which the coordinator says where it is; empty: "
            "coordinator.json in reef.data-dir"
        ),
    ] = ""
    coordinator_host: Annotated[
        str,
        msgspec.Meta(description="address at which the coordinator listens for its service", min_length=1),
    ] = "127.0.0.1"
    coordinator_port: Annotated[
        int, msgspec.Meta(description="port of the coordinator; 0: any free one", ge=0, le=65535)
    ] = 0
    data_plane: Annotated[
        str,
        msgspec.Meta(
            description="how the service reaches the engines. unix: sockets on this machine; tcp: from other machines "
            "too; auto: tcp where engines or coordinator may be on another machine, else unix"
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.executor not in KINDS and not is_class_path(self.executor):
            raise ValueError(
                f"executor must be one of {', '.join(KINDS)} or package.module:Class, got {self.executor!r}"
            )
        if self.ray_address and self.executor not in ("ray", "auto") and self.runtime != "ray_training":
            raise ValueError(
                f"ray-address is for the executors ray and auto, got {self.ray_address!r} with executor {self.executor}"
            )
        if self.ray_address != "auto" and self.ray_address and not re.fullmatch(r"[^/\s]+:\d+", self.ray_address):
            raise ValueError(f'ray-address must be host:port or "auto", got {self.ray_address!r}')
        if self.coordinator and self.runtime != "coordinator_training":
            raise ValueError(f"coordinator is for the runtime coordinator_training, got runtime {self.runtime}")
        if self.data_plane not in ("auto", "unix", "tcp"):
            raise ValueError(f"data-plane must be auto, unix or tcp, got {self.data_plane!r}")
