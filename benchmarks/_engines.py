"""Engines in processes of their own, behind their handlers, with the same threads: what comparisons of them share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from reef.inference.local.backend import LocalBackend
from reef.inference.local.client import LocalHandler
from reef.inference.local.config import LocalConfig
from reef.inference.sglang import environment
from reef.inference.sglang.backend import SGLangBackend
from reef.inference.sglang.client import SGLangHandler
from reef.inference.sglang.config import SGLangConfig
from reef.runtime.executor import make_executor
from reef.runtime.interfaces import InferenceBackend, InferenceHandler, PauseMode

KV_TOKENS = 65536
MAX_RUNNING = 64


@dataclass(slots=True)
class Running:
    """A started engine. `handler` is not connected yet."""

    backend: InferenceBackend
    handler: InferenceHandler


def sglang_is_built() -> bool:
    return environment.interpreter() is not None


@contextmanager
def running(name: str, model: Path, threads: int, *, share: bool, mode: PauseMode, lora: bool) -> Iterator[Running]:
    """Start "local" or "sglang" in bfloat16 on the CPU; `share` is whether prefixes are."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    backend: InferenceBackend
    handler: InferenceHandler
    if name == "local":
        config = LocalConfig(
            model_path=str(model), dtype="bfloat16", device="cpu", threads=threads, prefix_cache=share,
            kv_cache_tokens=KV_TOKENS, max_running=MAX_RUNNING, health_timeout=600.0,
        )  # fmt: skip
        backend = LocalBackend(config, lambda worker, arguments: make_executor("mp", worker, arguments, name="engine"))
        handler = LocalHandler(backend.endpoints)
    else:
        options = {"disable-radix-cache": not share, "max-running-requests": MAX_RUNNING}
        settings = SGLangConfig(
            model_path=str(model), dtype="bfloat16", device="cpu", options=options, start_timeout=1800.0,
            control_timeout=1800.0,
        )  # fmt: skip
        backend = SGLangBackend(settings, mode=mode, lora=lora)
        handler = SGLangHandler(backend.endpoints)
    backend.start()
    try:
        yield Running(backend, handler)
    finally:
        backend.close()


def processor_seconds() -> float:
    """Of this process and everything that it started and that still runs."""
    here = psutil.Process()
    found = 0.0
    for process in [here, *here.children(recursive=True)]:
        times = process.cpu_times()
        found += times.user + times.system
    return found
