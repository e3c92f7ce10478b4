"""Where work runs: `uni` in this process, `mp` in processes of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reef.runtime.executor.mp import MpExecutor
from reef.runtime.executor.uni import UniExecutor
from reef.runtime.interfaces import Executor

__all__ = ["MpExecutor", "UniExecutor", "make_executor"]


def make_executor(
    kind: str,
    worker_class: str,
    kwargs_per_rank: Sequence[Mapping[str, Any]],
    *,
    name: str = "worker",
    env_per_rank: Sequence[Mapping[str, str]] | None = None,
    log_directory: Path | None = None,
    start_timeout: float = 600.0,
) -> Executor:
    """Return an executor (not started) with one worker per entry of `kwargs_per_rank`.

    `worker_class` is "package.module:Class"; a worker is built where it will run. Worker `rank` is called
    "<name>-<rank>" in errors and logs. With `mp`, `env_per_rank` is added to the environment (OMP_NUM_THREADS and the
    like, seen before any import) and output goes to `<log_directory>/<name>-<rank>.log`; `uni` has neither.
    """
    if kind == "uni":
        return UniExecutor(worker_class, kwargs_per_rank, name=name, start_timeout=start_timeout)
    if kind == "mp":
        return MpExecutor(
            worker_class,
            kwargs_per_rank,
            name=name,
            env_per_rank=env_per_rank,
            log_directory=log_directory,
            start_timeout=start_timeout,
        )
    raise ValueError(f"executor must be one of uni, mp; got {kind!r}")
