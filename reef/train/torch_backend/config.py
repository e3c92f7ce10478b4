"""Section `training` of the deployment file with backend `torch`. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

PROCESS_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""For the worker's process. Torch's threads otherwise spin while they wait for each other, which makes a step many
times slower when there are more busy threads than cores; libgomp reads it once, when torch is imported. With a fixed
workspace cuBLAS computes the same sums each time (torch.use_deterministic_algorithms)."""


class TorchOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Key `training.options`."""

    disjoint_prefix_sharing: Annotated[
        bool,
        msgspec.Meta(
            description="without colocate, with SGLang: publications retract and flush, so that engines may share "
            "prefixes whatever keys they have"
        ),
    ] = False
    keep_lora_base_resident: Annotated[
        bool,
        msgspec.Meta(
            description="with colocate: a step frees the engines' KV cache only; the frozen base and its adapters "
            "stay on the device. A trainer that starts gets the whole device all the same"
        ),
    ] = False


class TorchConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """How candidates are trained. One optimizer step makes one candidate."""

    mode: Annotated[Literal["lora", "full"], msgspec.Meta(description="train an adapter, or all weights")] = "lora"
    lora_rank: Annotated[int, msgspec.Meta(description="rank of the adapter", ge=1)] = 16
    lora_alpha: Annotated[float, msgspec.Meta(description="the adapter is scaled by alpha / rank", gt=0)] = 32.0
    lora_target_modules: Annotated[
        tuple[str, ...], msgspec.Meta(description="names of the linear layers that get an adapter", min_length=1)
    ] = DEFAULT_TARGETS
    # Adapters take about ten times the rate of full weights; 1e-4 is safe for adapters on noisy feedback.
    learning_rate: Annotated[float, msgspec.Meta(description="step size of AdamW", gt=0)] = 1e-4
    beta1: Annotated[float, msgspec.Meta(description="decay of the gradient's mean", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(description="decay of the gradient's square", ge=0, lt=1)] = 0.95
    eps: Annotated[float, msgspec.Meta(description="floor of AdamW's denominator", gt=0)] = 1e-8
    weight_decay: Annotated[float, msgspec.Meta(description="decoupled weight decay", ge=0)] = 0.0
    max_grad_norm: Annotated[float, msgspec.Meta(description="clip the gradient's norm to this", gt=0)] = 1.0
    micro_batch_tokens: Annotated[
        int, msgspec.Meta(description="tokens per forward pass; a longer sample goes alone", ge=1)
    ] = 2048
    seed: Annotated[int, msgspec.Meta(description="initialises a fresh adapter", ge=0)] = 0
    threads: Annotated[int, msgspec.Meta(description="CPU threads; 0 leaves the choice to torch", ge=0)] = 0
    step_timeout: Annotated[
        float, msgspec.Meta(description="seconds after which a step is given up and the trainer replaced", gt=0)
    ] = 3600.0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        msgspec.Meta(description="of the compute; auto: float32 on a CPU, else the model's"),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], msgspec.Meta(description="auto: cuda if there is one")] = "auto"
    gradient_checkpointing: Annotated[bool, msgspec.Meta(description="recompute activations to save memory")] = False

    colocate: Annotated[
        bool,
        msgspec.Meta(
            description="trainer and engines share their devices: requests wait while a step runs; needs "
            "inference.pause-mode retract, which is then the default"
        ),
    ] = False
    options: Annotated[TorchOptions, msgspec.Meta(description="finer choices")] = TorchOptions()

    def __post_init__(self) -> None:
        if self.options.keep_lora_base_resident and not (self.colocate and self.mode == "lora"):
            raise ValueError(
                "options.keep-lora-base-resident must be false without colocate and mode lora: only the base of "
                f"adapters can stay, got colocate {str(self.colocate).lower()} and mode {self.mode}"
            )
        if "lm_head" in self.lora_target_modules:
            raise ValueError("lora-target-modules must not contain lm_head: no engine here serves such an adapter")
