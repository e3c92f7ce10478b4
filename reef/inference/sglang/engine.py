"""One SGLang engine: a process that Reef started, or one that it borrows."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path

from reef.errors import WorkerDied
from reef.inference.chat.grammars import WHITESPACE
from reef.inference.sglang.config import DISABLE, Option, SGLangConfig, flags
from reef.inference.sglang.control import EngineControl
from reef.inference.sglang.environment import PLUGIN_PATH, require_interpreter
from reef.inference.sglang.process import LeasedProcess, free_port
from reef.runtime.interfaces import BASE_LOAD_ID, PauseMode

log = logging.getLogger("reef.sglang")

_STOP_SECONDS = 30.0


class Engine(ABC):
    """What the backend drives. `control` is valid once `start` was called."""

    name: str
    control: EngineControl
    options: dict[str, Option]

    @abstractmethod
    def start(self, *, share: bool) -> None:
        """Begin to start; `share` is whether SGLang keeps a prefix cache. Raises ConfigError, EngineError."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Return when the engine answers. Raises WorkerDied, EngineError."""

    @abstractmethod
    def release(self) -> None:
        """Begin to stop."""

    @abstractmethod
    def stop(self) -> None:
        """Return when nothing of it runs any more. Raises ReefError."""

    @abstractmethod
    def death(self) -> str | None:
        """Why it is gone; None while it may live. Never blocks."""

    @property
    @abstractmethod
    def owned(self) -> bool: ...


class ManagedEngine(Engine):
    """Started, logged to a file, and stopped by Reef; dies with it."""

    def __init__(
        self,
        name: str,
        config: SGLangConfig,
        options: dict[str, Option],
        *,
        mode: PauseMode,
        lora: bool,
        colocated: bool,
        logs: Path | None,
    ) -> None:
        self.name = name
        self.options = options
        self._config = config
        self._mode = mode
        self._lora = lora
        self._colocated = colocated
        self._log = None if logs is None else logs / f"{name}.log"
        self._process: LeasedProcess | None = None
        self._share = False

    def start(self, *, share: bool) -> None:
        self._share = share
        port = free_port()
        self.control = EngineControl(self.name, f"http://127.0.0.1:{port}", self._config.control_timeout)
        self._process = LeasedProcess(self.name, self.command(port, share=share), self.environment(), self._log)

    def wait(self, seconds: float) -> None:
        """SGLang listens half a minute after its port was found free; if somebody took it, once more with another."""
        assert self._process is not None
        began = time.monotonic()
        try:
            self._process.wait_until(self.control.answers, seconds)
        except WorkerDied:
            if not self._process.printed("address already in use"):
                raise
            log.warning("the port of %s was taken before it listened: it is started again", self.name)
            self.stop()
            self.start(share=self._share)
            self._process.wait_until(self.control.answers, seconds - (time.monotonic() - began))

    def release(self) -> None:
        if self._process is not None:
            self._process.release()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop(_STOP_SECONDS)

    def death(self) -> str | None:
        return f"{self.name} is not started" if self._process is None else self._process.death()

    @property
    def owned(self) -> bool:
        return True

    def command(self, port: int, *, share: bool) -> list[str]:
        """What is run. Raises ConfigError where SGLang is not installed."""
        python = require_interpreter(self._config.python)
        return [str(python), "-m", "reef_sglang.serve", *flags(self._flags(port, share))]

    def _flags(self, port: int, share: bool) -> dict[str, Option]:
        config = self._config
        found: dict[str, Option] = {
            "model-path": config.model_path,
            "served-model-name": config.model_name,
            "host": "127.0.0.1",
            "port": port,
            "dtype": config.dtype,
            "weight-version": BASE_LOAD_ID,
            "incremental-streaming-output": True,
            "skip-server-warmup": True,
            "sleep-on-idle": True,
            "tensor-parallel-size": config.tensor_parallel_size,
            "grammar-backend": "llguidance",  # Reef's grammars of tool calls are written in its Lark
            "constrained-json-whitespace-pattern": WHITESPACE,
        }
        if config.max_context:
            found["context-length"] = config.max_context
        if config.device == "cpu":
            found |= {"device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch"}
            found["max-total-tokens"] = 65536
        if self._mode is PauseMode.IN_PLACE:
            # With overlap, the result of the step before a pause is handled after it, under the new weights' name.
            found["disable-overlap-schedule"] = True
        if self._colocated and config.device == "cuda":
            found["enable-memory-saver"] = True
        if self._lora:
            found |= {
                "enable-lora": True,
                "max-lora-rank": config.max_lora_rank,
                "lora-target-modules": list(config.lora_target_modules),
                "max-loras-per-batch": config.max_loads + 1,  # requests without an adapter take a slot as well
            }
            if config.device == "cpu":
                found["lora-backend"] = "torch_native"
        return {**found, **self.options, DISABLE: not share}

    def environment(self) -> dict[str, str]:
        config = self._config
        environment = {
            **os.environ,
            "PYTHONPATH": str(PLUGIN_PATH),
            "HF_HUB_OFFLINE": "1",
            "REEF_SGLANG_VERSION_KEYS": "1" if config.version_keys else "0",
        }
        if not config.python:  # Reef's own: without bytecode, imports take 26 s of processor time, not 11
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if config.device == "cpu":
            # Compiling a handful of small kernels takes minutes here, and saves nothing that anyone measures.
            environment |= {"SGLANG_PLATFORM": "reef_cpu", "OMP_WAIT_POLICY": "PASSIVE", "TORCHDYNAMO_DISABLE": "1"}
            environment.setdefault("OMP_NUM_THREADS", "1")
        return environment


class BorrowedEngine(Engine):
    """An engine that somebody else runs: verified and used, never stopped."""

    def __init__(self, name: str, url: str, config: SGLangConfig) -> None:
        self.name = name
        self.options = config.options
        self.control = EngineControl(name, url, config.control_timeout)

    def start(self, *, share: bool) -> None:
        pass

    def wait(self, seconds: float) -> None:
        self.control.state()

    def release(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def death(self) -> str | None:
        return None

    @property
    def owned(self) -> bool:
        return False
