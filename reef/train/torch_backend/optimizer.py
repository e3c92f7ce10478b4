"""AdamW on float32 masters, with its state as safetensors so that a candidate continues from a committed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from reef.errors import TrainingError
from reef.train.torch_backend.config import TorchConfig

TENSORS_FILE = "optimizer.safetensors"
INFO_FILE = "optimizer.json"
FORMAT = 1


class MasterOptimizer:
    """AdamW (Loshchilov and Hutter 2019) whose state can be exchanged.

    On disk: `exp_avg.<name>` and `exp_avg_sq.<name>` for each master, the number of steps taken, and, if asked for,
    `master.<name>`: what the weights on disk lost when they were rounded.
    """

    def __init__(self, masters: dict[str, nn.Parameter], config: TorchConfig) -> None:
        self.masters = masters
        self.max_grad_norm = config.max_grad_norm
        self.learning_rate = config.learning_rate
        self.steps = 0
        self._adamw = torch.optim.AdamW(
            masters.values(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def clip(self) -> float:
        """Scale the gradients down to `max_grad_norm`; return their norm before that."""
        return float(nn.utils.clip_grad_norm_(self.masters.values(), self.max_grad_norm))

    def step(self) -> None:
        self._adamw.step()
        self.steps += 1

    def reset(self) -> None:
        self._adamw.state.clear()
        self.steps = 0

    def write(self, directory: Path, job_id: str, *, with_masters: bool) -> None:
        directory.mkdir(parents=True)
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            state = self._adamw.state[master]
            tensors[f"exp_avg.{name}"], tensors[f"exp_avg_sq.{name}"] = state["exp_avg"], state["exp_avg_sq"]
            if with_masters:
                tensors[f"master.{name}"] = master.detach()
        save_file(tensors, directory / TENSORS_FILE)
        (directory / INFO_FILE).write_text(json.dumps({"format": FORMAT, "steps": self.steps, "job_id": job_id}))

    def read(self, directory: Path) -> dict[str, Tensor]:
        """Take the state over; return the masters it holds. Raises TrainingError if it is not of this model."""
        info = read_info(directory)
        if info.get("format") != FORMAT:
            raise TrainingError(f"optimizer state has format {info.get('format')}, this trainer reads {FORMAT}")
        tensors = load_file(directory / TENSORS_FILE)
        self.reset()
        for name, master in self.masters.items():
            averages = {}
            for key in ("exp_avg", "exp_avg_sq"):
                value = tensors.get(f"{key}.{name}")
                if value is None or value.shape != master.shape:
                    raise TrainingError(f"optimizer state does not fit this model: {key}.{name}")
                averages[key] = value.to(master.device, copy=True)
            self._adamw.state[master] = {"step": torch.tensor(float(info["steps"])).to(master.device), **averages}
        self.steps = info["steps"]
        return {name: tensors[f"master.{name}"] for name in self.masters if f"master.{name}" in tensors}


def read_info(directory: Path) -> dict[str, Any]:
    """What is said of a state beside its tensors: `format`, `steps`, `job_id`."""
    info: dict[str, Any] = json.loads((directory / INFO_FILE).read_text())
    return info
