"""Candidates on disk: an adapter as PEFT keeps it, or a model directory with one file for each parameter.

One file for each parameter lets a content store keep the unchanged ones once. The id of the job is written along, so
that a trainer recognises what it still holds, wherever a store moved it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from reef.errors import ConfigError, TrainingError
from reef.train.torch_backend.model import Policy

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
INDEX_FILE = "model.safetensors.index.json"
ORIGIN_FILE = "reef.json"
_METADATA = {"format": "pt"}  # one key at most: safetensors writes several in random order
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".index.json")


def write_weights(policy: Policy, directory: Path, job_id: str) -> None:
    """Write an adapter in float32 or full weights in the model's dtype. The directory must not exist."""
    directory.mkdir(parents=True)
    if policy.adapted is not None:
        tensors = {name: master.detach().cpu().contiguous() for name, master in policy.masters.items()}
        save_file(tensors, directory / ADAPTER_FILE, metadata=_METADATA)
        (directory / ADAPTER_CONFIG).write_text(_adapter_config(policy))
    else:
        _write_model(policy, directory)
    (directory / ORIGIN_FILE).write_text(json.dumps({"job_id": job_id}))


def written_by(directory: Path) -> str | None:
    """The job that wrote these weights, None if no job of this trainer did."""
    file = directory / ORIGIN_FILE
    job_id: str | None = json.loads(file.read_text())["job_id"] if file.exists() else None
    return job_id


def read_weights(policy: Policy, directory: Path) -> dict[str, Tensor]:
    """Read what `write_weights` wrote. Raises TrainingError if it does not fit the policy."""
    tensors: dict[str, Tensor] = {}
    if policy.adapted is not None:
        written, expected = json.loads((directory / ADAPTER_CONFIG).read_text()), json.loads(_adapter_config(policy))
        for key in ("r", "lora_alpha", "target_modules"):
            if written[key] != expected[key]:
                raise TrainingError(f"the incumbent adapter has {key} {written[key]}, training has {expected[key]}")
        tensors = load_file(directory / ADAPTER_FILE)
    else:
        for file in sorted(directory.glob("*.safetensors")):
            tensors |= load_file(file)
    for name, master in policy.masters.items():
        if name not in tensors or tensors[name].shape != master.shape:
            raise TrainingError(f"the incumbent does not fit this model: {name}")
    return tensors


def _adapter_config(policy: Policy) -> str:
    """PEFT's configuration, in one order, naming no base model's path."""
    assert policy.adapted is not None
    values = policy.adapted.peft_config["default"].to_dict() | {"base_model_name_or_path": None, "inference_mode": True}
    ordered = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
    return json.dumps(ordered, indent=2, sort_keys=True, default=str)


def _write_model(policy: Policy, directory: Path) -> None:
    if not (policy.model_path / "config.json").exists():
        raise ConfigError("training all weights needs a model directory with config.json and safetensors, not GGUF")
    for file in policy.model_path.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, directory / file.name)
    config = json.loads((policy.model_path / "config.json").read_text())
    config["dtype"] = str(policy.dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    files: dict[str, str] = {}
    for name, parameter in policy.parameters.items():
        files[name] = f"model.{name}.safetensors"
        save_file({name: parameter.detach().cpu().contiguous()}, directory / files[name], metadata=_METADATA)
    size = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True))
