"""The forward pass of Llama-like decoders over a flat batch of tokens.

Supported `model_type`s: llama (SmolLM2 too), mistral, qwen2, qwen3. Tokens of all sequences lie in one dimension; only
attention knows where a sequence ends. Shapes: T tokens, H hidden size, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reef.errors import EngineError
from reef.inference.local.attention import AttentionPlan
from reef.inference.local.lora import LoraBatch
from reef.inference.local.ops import Linear, Ops
from reef.inference.local.slices import Slices, whole

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What the forward pass needs to know of a `transformers` config. Equal specs run the same code."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool  # the embedding is the output projection too
    max_context: int
    inv_freq: tuple[float, ...]  # [head_dim / 2]
    rope_scale: float  # multiplies cos and sin

    @classmethod
    def from_config(cls, config: Any) -> ModelSpec:
        """Raises EngineError for a model that this engine does not run."""
        kind = config.model_type
        if kind not in MODEL_TYPES:
            raise EngineError(f"model_type must be one of {', '.join(MODEL_TYPES)}, got {kind!r}")
        if config.hidden_act != "silu":
            raise EngineError(f"hidden_act must be silu, got {config.hidden_act!r}")
        attention_bias = bool(getattr(config, "attention_bias", False))
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        inv_freq, rope_scale = _rope(config)
        return cls(
            model_type=kind,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab_size=config.vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            qkv_bias=attention_bias or kind == "qwen2",
            output_bias=attention_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=kind == "qwen3",
            tied_head=bool(config.tie_word_embeddings),
            # Up to the window, attention with and without it are the same.
            max_context=min(config.max_position_embeddings, window or config.max_position_embeddings),
            inv_freq=inv_freq,
            rope_scale=rope_scale,
        )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def fused_sizes(self) -> dict[str, tuple[int, int]]:
        """(output, input) size of each fused projection."""
        return {
            "qkv": (self.q_size + 2 * self.kv_size, self.hidden_size),
            "o": (self.hidden_size, self.q_size),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }


def _rope(config: Any) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and the scale of cos and sin; transformers knows the formulas of the scaled variants."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind not in _STATIC_ROPE:
        raise EngineError(f"rope_type must be one of {', '.join(_STATIC_ROPE)}, got {kind!r}")
    if kind == "default":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        inv_freq = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        return tuple(inv_freq.tolist()), 1.0
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(inv_freq.tolist()), float(scale)


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    input_norm: Tensor  # [H]
    qkv: Linear
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Linear
    post_norm: Tensor  # [H]
    gate_up: Linear
    down: Linear


@dataclass(slots=True, kw_only=True)
class ModelWeights:
    embedding: Tensor  # [V, H]
    layers: list[LayerWeights]
    norm: Tensor  # [H]
    lm_head: Linear


@dataclass(slots=True, kw_only=True)
class Batch:
    """The tokens of one forward pass, and where their sequences lie."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    attention: AttentionPlan
    lora: LoraBatch | None = None


@dataclass(slots=True)
class Model:
    """The code shared by all weight sets of one spec. `max_context` bounds positions."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    max_context: int
    ops: Ops
    _cos: Tensor = field(init=False)  # [max_context, D / 2]
    _sin: Tensor = field(init=False)

    def __post_init__(self) -> None:
        inv_freq = torch.tensor(self.spec.inv_freq, dtype=torch.float32)
        angles = torch.arange(self.max_context, dtype=torch.float32)[:, None] * inv_freq
        self._cos = (angles.cos() * self.spec.rope_scale).to(self.device, self.dtype)
        self._sin = (angles.sin() * self.spec.rope_scale).to(self.device, self.dtype)

    def forward(self, weights: ModelWeights, batch: Batch) -> Tensor:
        """Return the last layer's output [T, H], normed; write K and V where the plan says."""
        return whole(self.forward_in_slices(weights, batch))

    def forward_in_slices(self, weights: ModelWeights, batch: Batch) -> Slices[Tensor]:
        """`forward`, a layer at a time."""
        ops, eps, lora = self.ops, self.spec.rms_norm_eps, batch.lora
        hidden = F.embedding(batch.token_ids, weights.embedding)
        delta: Tensor | None = None  # what the layer before adds to `hidden`
        for index, layer in enumerate(weights.layers):
            normed = ops.add_norm(hidden, delta, layer.input_norm, eps)
            qkv = _project(layer.qkv, normed, lora, index, "qkv")
            mixed = self._attend(index, layer, qkv, batch)
            delta = _project(layer.o, mixed, lora, index, "o")
            normed = ops.add_norm(hidden, delta, layer.post_norm, eps)
            gated = ops.silu_mul(_project(layer.gate_up, normed, lora, index, "gate_up"))
            delta = _project(layer.down, gated, lora, index, "down")
            yield
        return ops.add_norm(hidden, delta, weights.norm, eps)

    def _attend(self, index: int, layer: LayerWeights, qkv: Tensor, batch: Batch) -> Tensor:
        """[T, q_size + 2 kv_size] -> [T, q_size]."""
        spec = self.spec
        heads = qkv.view(-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q.copy_(F.rms_norm(q, (spec.head_dim,), layer.q_norm, spec.rms_norm_eps))
            k.copy_(F.rms_norm(k, (spec.head_dim,), layer.k_norm, spec.rms_norm_eps))
        self.ops.rotate_store(heads, spec.num_kv_heads, self._cos, self._sin, batch.positions, index, batch.attention)
        return self.ops.attend(q, k, v, index, batch.attention).view(-1, spec.q_size)


def _project(linear: Linear, x: Tensor, lora: LoraBatch | None, layer: int, target: str) -> Tensor:
    y = linear(x)
    return y if lora is None else lora.add(layer, target, x, y)
