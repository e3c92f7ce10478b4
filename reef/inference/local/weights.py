"""Weights from disk into the layout that the model runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reef.errors import EngineError
from reef.inference.local.lora import Part
from reef.inference.local.model import LayerWeights, ModelSpec, ModelWeights
from reef.inference.local.ops import Linear, Ops
from reef.inference.local.slices import Slices
from reef.inference.local.tensor_file import read_tensors
from reef.inference.source import model_source

_INDEX = "model.safetensors.index.json"


def read_config(path: Path) -> Any:
    """The `transformers` config of a model directory or GGUF file. Raises EngineError."""
    from transformers import AutoConfig

    try:
        source, options = model_source(path)
        return AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"cannot read the model's config: {error}") from error


def read_state(path: Path) -> Slices[dict[str, Tensor]]:
    """Every tensor of a model by its name in `transformers`. Raises EngineError.

    A GGUF file is dequantized by transformers. Several safetensors files are joined by their index.
    """
    source, options = model_source(path)
    if options:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(source, **options, dtype=torch.float32)
        return dict(model.state_dict())
    names = ["model.safetensors"]
    try:
        if (source / _INDEX).exists():
            weight_map: dict[str, str] = json.loads((source / _INDEX).read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"cannot read the model's weights: {error}") from error
    state: dict[str, Tensor] = {}
    for name in names:
        state |= yield from read_tensors(source / name)
    return state


def end_token_ids(path: Path, config: Any) -> frozenset[int]:
    """The model's end tokens: those of its generation config and of its config."""
    from transformers import GenerationConfig

    found = [config.eos_token_id]
    if (path / "generation_config.json").exists():
        found.append(GenerationConfig.from_pretrained(path).eos_token_id)
    return frozenset(one for ids in found if ids is not None for one in (ids if isinstance(ids, list) else [ids]))


def projection_parts(spec: ModelSpec) -> dict[str, Part]:
    q, kv, mlp = spec.q_size, spec.kv_size, spec.intermediate_size
    return {
        "q_proj": Part("qkv", 0, q),
        "k_proj": Part("qkv", q, kv),
        "v_proj": Part("qkv", q + kv, kv),
        "o_proj": Part("o", 0, spec.hidden_size),
        "gate_proj": Part("gate_up", 0, mlp),
        "up_proj": Part("gate_up", mlp, mlp),
        "down_proj": Part("down", 0, spec.hidden_size),
    }


def build_weights(
    state: Mapping[str, Tensor], spec: ModelSpec, dtype: torch.dtype, device: torch.device, ops: Ops
) -> Slices[ModelWeights]:
    """Fuse and place the weights. Raises EngineError if any is missing, unexpected, misshapen or not finite."""
    reader = _Reader(state, dtype, device, ops)
    embedding = reader.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = []
    for index in range(spec.num_layers):
        yield
        layers.append((yield from _layer(reader, spec, f"model.layers.{index}.")))
    yield
    norm = reader.take("model.norm.weight", spec.hidden_size)
    head = embedding if spec.tied_head else reader.take("lm_head.weight", spec.vocab_size, spec.hidden_size)
    reader.check_all_taken(unless="lm_head.weight" if spec.tied_head else "")
    yield
    return ModelWeights(embedding=embedding, layers=layers, norm=norm, lm_head=ops.linear(head, None))


def _layer(reader: _Reader, spec: ModelSpec, prefix: str) -> Slices[LayerWeights]:
    hidden, head_dim = spec.hidden_size, spec.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = [
        (attention + name, size) for name, size in zip(("q_proj", "k_proj", "v_proj"), _qkv_sizes(spec), strict=True)
    ]
    gate_up = [(mlp + name, spec.intermediate_size) for name in ("gate_proj", "up_proj")]
    fused_qkv = reader.linear(qkv, hidden, spec.qkv_bias)
    yield
    fused_gate_up = reader.linear(gate_up, hidden, spec.mlp_bias)
    yield
    down = reader.linear([(mlp + "down_proj", hidden)], spec.intermediate_size, spec.mlp_bias)
    yield
    return LayerWeights(
        input_norm=reader.take(prefix + "input_layernorm.weight", hidden),
        qkv=fused_qkv,
        q_norm=reader.take(attention + "q_norm.weight", head_dim) if spec.qk_norm else None,
        k_norm=reader.take(attention + "k_norm.weight", head_dim) if spec.qk_norm else None,
        o=reader.linear([(attention + "o_proj", hidden)], spec.q_size, spec.output_bias),
        post_norm=reader.take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=fused_gate_up,
        down=down,
    )


def _qkv_sizes(spec: ModelSpec) -> tuple[int, int, int]:
    return spec.q_size, spec.kv_size, spec.kv_size


class _Reader:
    """Takes tensors out of a state dict, each checked, cast and placed."""

    def __init__(self, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, ops: Ops) -> None:
        self._state = state
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._taken: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._state.get(name)
        if tensor is None:
            raise EngineError(f"the weights lack {name}")
        if tuple(tensor.shape) != shape:
            raise EngineError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        placed = tensor.to(self._device, self._dtype)
        if not placed.isfinite().all():
            raise EngineError(f"{name} is not finite")
        self._taken.add(name)
        return placed

    def linear(self, parts: list[tuple[str, int]], in_size: int, bias: bool) -> Linear:
        """One projection whose outputs are those of `parts`, given as (name, output size)."""
        weight = torch.cat([self.take(f"{name}.weight", size, in_size) for name, size in parts])
        biases = torch.cat([self.take(f"{name}.bias", size) for name, size in parts]) if bias else None
        return self._ops.linear(weight, biases)

    def check_all_taken(self, unless: str) -> None:
        rest = self._state.keys() - self._taken - {unless}
        extra = sorted(name for name in rest if not name.endswith("rotary_emb.inv_freq"))
        if extra:
            raise EngineError(f"the weights have {len(extra)} tensors that this model does not use, such as {extra[0]}")
