"""The policy: a causal language model whose trainable parameters have float32 master copies."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from reef import device
from reef.errors import ConfigError
from reef.runtime.interfaces import WeightKind
from reef.train.torch_backend import attention
from reef.train.torch_backend.config import TorchConfig
from reef.train.torch_backend.logprobs import head_logprobs
from reef.train.torch_backend.packing import MicroBatch, pack_one

SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference in nats between Reef's forward pass and the model's own."""


class Policy:
    """A model with exchangeable trainable parameters.

    `parameters` compute, in the model's dtype; `masters` are what the optimizer moves, float32, under their names on
    disk. Where the model computes in float32 they are the same tensors. Raises ConfigError if the model cannot train.
    """

    def __init__(self, model_path: Path, config: TorchConfig, *, check: bool = True) -> None:
        """`check` compares Reef's forward pass with the model's own."""
        self.kind = WeightKind(config.mode)
        self.model_path = model_path
        self.device: torch.device = device.choose(config.device, "training.device")
        self.dtype = _dtype(model_path, config.dtype, self.device)
        self.causal = load_causal(model_path, self.dtype, self.device)
        self.adapted = _adapt(self.causal, config) if self.kind is WeightKind.LORA else None
        self._frozen_base: PreTrainedModel | None = None
        if check:
            _check_forward(self.causal)
        if config.gradient_checkpointing:
            _checkpoint_layers(self.causal)
        module: nn.Module = self.adapted or self.causal
        # PEFT's files leave out the adapter's name, which its modules carry.
        self.parameters = {
            name.replace(".default.", "."): parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self.masters = {
            name: parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())
            for name, parameter in self.parameters.items()
        }

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability of each trained token and entropy of its distribution, float32 [num_trained], nats."""
        return _forward(self.causal, batch)

    def base_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities under the base model, float32 [num_trained]. With full weights a copy is loaded once."""
        if self.adapted is not None:
            with torch.no_grad(), self.adapted.disable_adapter():
                return _forward(self.causal, batch)[0]
        if self._frozen_base is None:
            self._frozen_base = load_causal(self.model_path, self.dtype, self.device)
        with torch.no_grad():
            return _forward(self._frozen_base, batch)[0]

    def score(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of token_ids[1:], as an engine of the same dtype computes them."""
        with torch.no_grad():
            logprobs, _ = _forward(self.causal, pack_one(token_ids))
        values: list[float] = logprobs.tolist()
        return values

    def collect_gradients(self) -> None:
        """Add the gradients of the last backward pass to those of the masters."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def drop_gradients(self) -> None:
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None

    def assign(self, values: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.data.copy_(values[name])
        self.synchronize()

    def synchronize(self) -> None:
        """Round the masters into the parameters that compute."""
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self.masters[name].data)


def load_causal(model_path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a model that attends through block plans, without dropout."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention.NAME}
    if model_path.is_file():
        model_path, options["gguf_file"] = model_path.parent, model_path.name
    elif not (model_path / "config.json").exists() and (files := sorted(model_path.glob("*.gguf"))):
        options["gguf_file"] = files[0].name
    causal = AutoModelForCausalLM.from_pretrained(model_path, **options).to(device).eval()
    for module in causal.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return causal


def _checkpoint_layers(causal: PreTrainedModel) -> None:
    causal.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the new name is younger than the oldest supported transformers
        causal.gradient_checkpointing_enable({"use_reentrant": False})


def _forward(causal: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    device = causal.device

    def tensor(values: Any) -> Tensor:
        return torch.from_numpy(values).to(device)

    hidden = causal.get_decoder()(
        input_ids=tensor(batch.token_ids)[None],
        position_ids=tensor(batch.position_ids)[None],
        use_cache=False,
        block_plan=attention.plan_blocks(batch.blocks, device, causal.dtype),
    ).last_hidden_state[0]
    weight = causal.get_output_embeddings().weight
    return head_logprobs(hidden[tensor(batch.rows)], weight, tensor(batch.row), tensor(batch.targets))


def _check_forward(causal: PreTrainedModel) -> None:
    """Compare with the model's own forward pass: logit scaling, soft caps or a head with a bias would show."""
    token_ids = [(7 * i + 1) % min(1000, causal.config.vocab_size) for i in range(24)]
    ids = torch.tensor([token_ids], device=causal.device)
    with torch.no_grad():
        ours, _ = _forward(causal, pack_one(token_ids))
        causal.set_attn_implementation("sdpa")
        logits = causal(input_ids=ids, use_cache=False).logits[0, :-1].float()
        causal.set_attn_implementation(attention.NAME)
    theirs = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None]).squeeze(1)
    difference = float((ours - theirs).abs().mean())
    if not difference <= SELF_CHECK_TOLERANCE[causal.dtype]:
        raise ConfigError(
            f"{type(causal).__name__} cannot be trained here: its log-probabilities differ by {difference:.3g} nats "
            f"from its own forward pass (at most {SELF_CHECK_TOLERANCE[causal.dtype]})"
        )


def _adapt(causal: PreTrainedModel, config: TorchConfig) -> peft.PeftModel:
    """Add a fresh adapter: A from the seed, B zero."""
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=list(config.lora_target_modules),
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is on its way out
        torch.manual_seed(config.seed)
        try:
            return peft.get_peft_model(causal, lora, autocast_adapter_dtype=False)
        except ValueError as error:
            raise ConfigError(f"training.lora-target-modules: {error}") from error


def _dtype(model_path: Path, name: str, device: torch.device) -> torch.dtype:
    """auto: on a CPU float32, whose backward pass is many times faster there than bfloat16's."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        stored = AutoConfig.from_pretrained(model_path).dtype if (model_path / "config.json").exists() else None
        return torch.bfloat16 if stored in (torch.bfloat16, torch.float16) else torch.float32
    return torch.float32 if name == "float32" else torch.bfloat16
