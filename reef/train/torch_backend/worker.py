"""The trainer's process: keeps the model resident and turns jobs into candidates."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging as transformers_logging

from reef import device
from reef.errors import StorageError, TrainingError
from reef.points import Point, crossing
from reef.runtime.interfaces import MemoryRegion, MemoryReport, TrainJob, TrainResult, TransferSession
from reef.train.objectives import lookup
from reef.train.torch_backend.config import TorchConfig
from reef.train.torch_backend.model import Policy, load_causal
from reef.train.torch_backend.optimizer import MasterOptimizer, read_info
from reef.train.torch_backend.step import collect_tokens, take_step
from reef.train.torch_backend.weights import read_weights, write_weights, written_by

Identity = tuple[str | None, str | None]
"""The jobs that wrote weights and optimizer state; "" is the base or a fresh state, None is not known."""

BASE: Identity = ("", "")
UNKNOWN: Identity = (None, None)


class TorchWorker:
    """One model on one device. Public methods are called by name through an executor, one at a time.

    A candidate stays resident, and the next job that starts from it has nothing to load. Every other incumbent (after
    a rejection, of another scenario, after a rollback) is loaded from its directory.
    """

    def __init__(self, model_path: str, config: TorchConfig) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        transformers_logging.disable_progress_bar()
        self._model_path = Path(model_path)
        self._config = config
        self._device = device.choose(config.device, "training.device")
        if self._device.type == "cuda":
            torch.use_deterministic_algorithms(True, warn_only=True)
        self._build(check=True)

    def _build(self, *, check: bool) -> None:
        """Load the base; `check` it once in a process."""
        self._policy: Policy = Policy(self._model_path, self._config, check=check)
        self._optimizer: MasterOptimizer = MasterOptimizer(self._policy.masters, self._config)
        self._fresh_adapter: dict[str, Tensor] = {}
        if self._policy.adapted is not None:
            self._fresh_adapter = {name: master.detach().clone() for name, master in self._policy.masters.items()}
        self._resident: Identity = BASE
        self._released = False
        self._probe: tuple[list[int], list[float]] = ([], [])  # ids and their log-probabilities under what is resident

    def release_memory(self) -> MemoryReport:
        """Drop model, masters and optimizer state; all of it is on disk, or of no use."""
        with crossing(Point.TRAINER_RELEASE_MEMORY):
            before = device.held_bytes(self._device)
            if not self._released:
                del self._policy, self._optimizer, self._fresh_adapter
            self._released = True
            device.give_back(self._device)
            return self._memory(before)

    def restore_memory(self) -> MemoryReport:
        """Load the base; the next job loads its incumbent."""
        with crossing(Point.TRAINER_RESTORE_MEMORY):
            before = device.held_bytes(self._device)
            if self._released:
                self._build(check=False)
            device.give_back(self._device)  # what loading took besides
            return self._memory(before)

    def _memory(self, before: int) -> MemoryReport:
        return MemoryReport(
            owner="trainer",
            released=[MemoryRegion.WEIGHTS, MemoryRegion.OPTIMIZER] if self._released else [],
            bytes_before=before,
            bytes_after=device.held_bytes(self._device),
            device_free=device.free_bytes(self._device),
        )

    def health(self) -> None:
        """Answers when the worker is alive and not busy."""

    def attach(self, session: TransferSession) -> None:
        """Leave the token where the engines look for it. Raises StorageError."""
        try:
            (Path(session.directory) / "token").write_text(session.token)
        except OSError as error:
            raise StorageError(f"the trainer cannot write to {session.directory}: {error.strerror}") from error

    def train(self, job: TrainJob) -> TrainResult:
        """See TrainingBackend.train. Raises TrainingError or StorageError; then nothing was written."""
        assert not self._released, "a step without the device"
        started = time.perf_counter()
        try:
            loss = lookup(job.signal.objective)
        except ValueError as error:
            raise TrainingError(str(error)) from error
        config = self._policy.causal.config
        tokens = collect_tokens(job.signal.samples, config.vocab_size, config.max_position_embeddings)
        loaded = self._load(job)
        before = self._score(job.probe_ids)
        self._resident = UNKNOWN  # until the candidate is on disk nothing describes what is loaded
        try:
            with crossing(Point.TRAINER_STEP):
                metrics = take_step(self._policy, self._optimizer, tokens, loss, self._config.micro_batch_tokens)
        except TrainingError:
            self._resident = loaded  # nothing moved
            raise
        after = self._policy.score(job.probe_ids)
        with crossing(Point.TRAINER_WRITE):
            weights, state = self._write(Path(job.output_path), job.job_id)
        self._resident, self._probe = (job.job_id, job.job_id), (job.probe_ids, after)
        return TrainResult(
            weights_path=str(weights),
            state_path=str(state),
            metrics=metrics | _speed(metrics, time.perf_counter() - started),
            probe_logprobs=after,
            incumbent_probe_logprobs=before,
        )

    def _load(self, job: TrainJob) -> Identity:
        """Make the job's incumbent resident; return its identity."""
        wanted = _identity(job)
        if self._resident == wanted and None not in wanted:
            return wanted
        self._resident, self._probe = UNKNOWN, ([], [])
        values = self._weights(job.incumbent_path)
        if job.state_path is None:
            self._optimizer.reset()
        else:
            exact = self._optimizer.read(Path(job.state_path))
            for name, master in exact.items():
                if not torch.equal(master.to(values[name].dtype), values[name].cpu()):
                    raise TrainingError(f"the optimizer state is not of these weights: {name}")
            values |= exact
        self._policy.assign(values)
        self._resident = wanted
        return wanted

    def _weights(self, path: str | None) -> dict[str, Tensor]:
        if path is not None:
            return read_weights(self._policy, Path(path))
        if self._policy.adapted is not None:
            return dict(self._fresh_adapter)
        base = load_causal(self._policy.model_path, self._policy.dtype, self._policy.device)
        return {name: parameter.detach() for name, parameter in base.named_parameters()}

    def _score(self, probe_ids: list[int]) -> list[float]:
        if self._probe[0] != probe_ids:
            self._probe = (probe_ids, self._policy.score(probe_ids))
        return self._probe[1]

    def _write(self, output: Path, job_id: str) -> tuple[Path, Path]:
        """Write the candidate below `output`, replacing what an interrupted attempt left there."""
        weights, state = output / "weights", output / "state"
        for directory in (weights, state):
            shutil.rmtree(directory, ignore_errors=True)
        try:
            write_weights(self._policy, weights, job_id)
            rounded = self._policy.adapted is None and self._policy.dtype != torch.float32
            self._optimizer.write(state, job_id, with_masters=rounded)
        except (OSError, SafetensorError) as error:
            for directory in (weights, state):
                shutil.rmtree(directory, ignore_errors=True)
            raise StorageError(f"the candidate could not be written: {error}") from error
        return weights, state


def _identity(job: TrainJob) -> Identity:
    weights = "" if job.incumbent_path is None else written_by(Path(job.incumbent_path))
    state = "" if job.state_path is None else read_info(Path(job.state_path)).get("job_id")
    return weights, state


def _speed(metrics: dict[str, Any], seconds: float) -> dict[str, float]:
    return {"seconds": seconds, "tokens_per_second": metrics["trained_tokens"] / seconds}
