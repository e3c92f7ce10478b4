"""Where work runs: `uni` in this process, `mp` in processes of its own, `ray` in actors; or a class of yours."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reef.errors import ConfigError
from reef.named import load_subclass
from reef.runtime.executor.mp import MpExecutor
from reef.runtime.executor.uni import UniExecutor
from reef.runtime.interfaces import Executor

__all__ = ["MpExecutor", "UniExecutor", "executor_class", "is_class_path", "make_executor", "resolve_kind"]

KINDS = ("auto", "mp", "uni", "ray")


def resolve_kind(kind: str, ray_address: str = "") -> str:
    """Return what `kind` stands for: `auto` is `ray` where the address of a cluster is known, else `mp`."""
    if kind == "auto":
        return "ray" if ray_address or os.environ.get("RAY_ADDRESS") else "mp"
    return kind


def make_executor(
    kind: str,
    worker_class: str,
    kwargs_per_rank: Sequence[Mapping[str, Any]],
    *,
    name: str = "worker",
    env_per_rank: Sequence[Mapping[str, str]] | None = None,
    log_directory: Path | None = None,
    start_timeout: float = 600.0,
    **options: Any,
) -> Executor:
    """Return an executor (not started) with one worker per entry of `kwargs_per_rank`.

    `kind` is uni, mp, ray, auto or the path "package.module:Class" of a subclass of Executor. `worker_class` is such a
    path too; a worker is built where it will run. Worker `rank` is called "<name>-<rank>" in errors and logs. Except
    with `uni`, `env_per_rank` is added to the environment (OMP_NUM_THREADS and the like, seen before any import) and
    output goes to `<log_directory>/<name>-<rank>.log`. `options` are for the executor's class: `reservation` for `ray`.

    Raises ConfigError for `ray` where it is not installed, and for a class that cannot be used.
    """
    made: Executor = executor_class(resolve_kind(kind))(
        worker_class,
        kwargs_per_rank,
        name=name,
        env_per_rank=env_per_rank,
        log_directory=log_directory,
        start_timeout=start_timeout,
        **options,
    )
    return made


def executor_class(kind: str) -> Any:
    """The class that `kind`, other than auto, stands for; see `make_executor`."""
    if kind == "uni":
        return UniExecutor
    if kind == "mp":
        return MpExecutor
    if kind == "ray":
        if find_spec("ray") is None:
            raise ConfigError("execution.executor ray needs the package ray: pip install 'reef[ray]'")
        from reef.runtime.executor.ray import RayExecutor

        return RayExecutor
    if not is_class_path(kind):
        raise ValueError(f"executor must be one of {', '.join(KINDS)} or package.module:Class; got {kind!r}")
    return load_subclass("execution.executor", kind, Executor)


def is_class_path(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", text) is not None
