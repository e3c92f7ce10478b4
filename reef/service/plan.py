"""What a deployment's coordinator runs, from its configuration; nothing here starts or allocates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reef.artifact.base import base_content_id
from reef.artifact.content import DirectoryContentStore
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.inference.local.backend import LocalBackend
from reef.records.opening import artifacts_directory
from reef.runtime.coordinator import DeploymentPlan
from reef.runtime.interfaces import MemoryRegion, PauseMode, TrainingBackend
from reef.runtime.publication import probe_ids
from reef.service.config import NoTraining, ReefConfig
from reef.service.workplace import ENGINE, TRAINER, Workplace
from reef.train.torch_backend.backend import TorchBackend

TORCH_WORKER = "reef.train.torch_backend.worker:TorchWorker"


@dataclass(slots=True, kw_only=True)
class Foundation:
    """What service and coordinator must agree on, read from the model and the data directory."""

    data: Path
    tokenizer: ChatTokenizer
    base_content_id: str
    contents: DirectoryContentStore
    probe_ids: list[int]


def lay_foundation(config: ReefConfig) -> Foundation:
    """Read the model's tokenizer and hash its weights, once per model. Blocks. Raises ConfigError."""
    data, model = Path(config.reef.data_dir), Path(config.inference.model_path)
    inference = config.inference
    tokenizer = ChatTokenizer.load(model, inference.tool_format, inference.reasoning_format)
    return Foundation(
        data=data,
        tokenizer=tokenizer,
        base_content_id=base_content_id(model, data / "base-model.json"),
        contents=DirectoryContentStore(artifacts_directory(config.storage, data)),
        probe_ids=probe_ids(tokenizer.vocab_size),
    )


def build_plan(config: ReefConfig, foundation: Foundation) -> DeploymentPlan:
    """What a coordinator of this deployment would start; allocates nothing."""
    workplace = Workplace(config.execution, config.inference, config.training, foundation.data)
    engines = LocalBackend(
        config.inference,
        partial(workplace.executor, ENGINE),
        base_content_id=foundation.base_content_id,
        host=workplace.data_plane_host,
    )
    return DeploymentPlan(
        resources=workplace,
        inference=engines,
        training=_trainer(config, workplace),
        directory=foundation.data,
        contents=foundation.contents,
        base_content_id=foundation.base_content_id,
        pause_mode=PauseMode(config.inference.pause_mode),
        probe_ids=foundation.probe_ids,
        **_sharing(config),
    )


def _sharing(config: ReefConfig) -> dict[str, Any]:
    training = config.training
    if isinstance(training, NoTraining):
        return {}
    resident = (MemoryRegion.WEIGHTS,) if training.options.keep_lora_base_resident else ()
    return {"colocate": training.colocate, "resident": resident}


def _trainer(config: ReefConfig, workplace: Workplace) -> TrainingBackend | None:
    if isinstance(config.training, NoTraining):
        return None
    arguments = {"model_path": config.inference.model_path, "config": config.training}
    return TorchBackend(config.training, partial(workplace.executor, TRAINER, TORCH_WORKER, [arguments]))
