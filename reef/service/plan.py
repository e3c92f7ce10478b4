"""What a deployment's coordinator runs, from its configuration; nothing here starts or allocates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reef.artifact.base import base_content_id
from reef.artifact.content import DirectoryContentStore
from reef.errors import ConfigError
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.inference.local.backend import LocalBackend
from reef.inference.local.config import LocalConfig
from reef.inference.provider.config import ProviderConfig
from reef.inference.sglang.backend import SGLangBackend
from reef.inference.sglang.config import SGLangConfig
from reef.records.opening import artifacts_directory
from reef.runtime.coordinator import DeploymentPlan
from reef.runtime.interfaces import InferenceBackend, MemoryRegion, PauseMode, TrainingBackend
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


def managed(config: ReefConfig) -> LocalConfig | SGLangConfig:
    """The engines' section. Raises ConfigError where there are none."""
    if isinstance(config.inference, ProviderConfig):
        raise ConfigError("inference.backend is provider: it has no engines for a coordinator to run")
    return config.inference


def lay_foundation(config: ReefConfig) -> Foundation:
    """Read the model's tokenizer and hash its weights, once per model. Blocks. Raises ConfigError."""
    inference = managed(config)
    data, model = Path(config.reef.data_dir), Path(inference.model_path)
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
    workplace = Workplace(config.execution, managed(config), config.training, foundation.data)
    return DeploymentPlan(
        resources=workplace,
        inference=_engines(config, foundation, workplace),
        training=_trainer(config, workplace),
        directory=foundation.data,
        contents=foundation.contents,
        base_content_id=foundation.base_content_id,
        pause_mode=pause_mode(config),
        probe_ids=foundation.probe_ids,
        **_sharing(config),
    )


def pause_mode(config: ReefConfig) -> PauseMode:
    """How this deployment's publications pause. Raises ConfigError where what was set contradicts the rest."""
    inference, training = config.inference, config.training
    if isinstance(inference, ProviderConfig):
        return PauseMode.IN_PLACE  # nothing is ever published
    if not isinstance(inference, SGLangConfig):
        return PauseMode(inference.pause_mode)
    if isinstance(training, NoTraining):
        return inference.pausing(colocated=False, disjoint_prefix_sharing=False)
    return inference.pausing(
        colocated=training.colocate, disjoint_prefix_sharing=training.options.disjoint_prefix_sharing
    )


def _engines(config: ReefConfig, foundation: Foundation, workplace: Workplace) -> InferenceBackend:
    inference, training, base = managed(config), config.training, foundation.base_content_id
    if isinstance(inference, SGLangConfig):
        return SGLangBackend(
            inference,
            mode=pause_mode(config),
            lora=isinstance(training, NoTraining) or training.mode == "lora",
            colocated=not isinstance(training, NoTraining) and training.colocate,
            base_content_id=base,
            logs=foundation.data / "logs",
        )
    return LocalBackend(
        inference, partial(workplace.executor, ENGINE), base_content_id=base, host=workplace.data_plane_host
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
    arguments = {"model_path": managed(config).model_path, "config": config.training}
    return TorchBackend(config.training, partial(workplace.executor, TRAINER, TORCH_WORKER, [arguments]))
