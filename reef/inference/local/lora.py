"""LoRA adapters: reading a PEFT directory, and several adapters in one batch.

An adapter is laid out for the fused projections: the A matrices of q, k and v are stacked, their B matrices form a
block-diagonal one, already multiplied by the scale. In a batch the adapters are stacked once more; a mask over
(token, rank) keeps each token to its own adapter. Shapes: T tokens, r rank of an adapter in a fused projection (the sum
of its parts), R the sum of r over the adapters in a batch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reef.errors import EngineError
from reef.inference.local.slices import Slices
from reef.inference.local.tensor_file import read_tensors

_FUSED = ("qkv", "o", "gate_up", "down")
_KEY = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+_proj)\.lora_([AB])(?:\.default)?\.weight"
)
_MUST_BE_OFF = ("use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias")


@dataclass(slots=True, frozen=True)
class Part:
    """Rows of a fused projection's output that belong to one projection."""

    fused: str
    start: int
    size: int


@dataclass(slots=True, frozen=True)
class Adapter:
    """Per fused projection the matrices of all layers: a [layers, r, input], b [layers, r, output] with the scale."""

    a: dict[str, Tensor]
    b: dict[str, Tensor]


def read_adapter(
    path: Path,
    *,
    num_layers: int,
    fused_sizes: Mapping[str, tuple[int, int]],
    parts: Mapping[str, Part],
    dtype: torch.dtype,
    device: torch.device,
) -> Slices[Adapter]:
    """Read adapter_config.json and adapter_model.safetensors. Raises EngineError for what cannot be served exactly."""
    scale = _scale(path)
    tensors = yield from read_tensors(path / "adapter_model.safetensors")
    pairs = _pairs(tensors, num_layers, parts)
    yield
    if not pairs:
        raise EngineError("the adapter has no weights")
    ranks = {
        name: max(a.shape[0] for (_, part), (a, _) in pairs.items() if part == name)
        for name in sorted({name for _, name in pairs}, key=list(parts).index)
    }
    a_out: dict[str, Tensor] = {}
    b_out: dict[str, Tensor] = {}
    for fused, (out_size, in_size) in fused_sizes.items():
        members = [name for name in ranks if parts[name].fused == fused]
        if not members:
            continue
        rank = sum(ranks[name] for name in members)
        a_all = a_out[fused] = torch.zeros(num_layers, rank, in_size, dtype=dtype, device=device)
        b_all = b_out[fused] = torch.zeros(num_layers, rank, out_size, dtype=dtype, device=device)
        column = 0
        for name in members:
            part = parts[name]
            for layer in range(num_layers):
                if (pair := pairs.get((layer, name))) is None:
                    continue
                a, b = (tensor.float() for tensor in pair)
                if a.shape[1] != in_size or b.shape != (part.size, a.shape[0]):
                    raise EngineError(
                        f"the adapter's {name} of layer {layer} does not fit: A is {tuple(a.shape)}, B {tuple(b.shape)}"
                    )
                end = column + a.shape[0]
                own_a = a_all[layer, column:end]
                own_b = b_all[layer, column:end, part.start : part.start + part.size]
                own_a.copy_(a)
                own_b.copy_((b * scale).t())
                if not (own_a.isfinite().all() and own_b.isfinite().all()):
                    raise EngineError(f"the adapter's {name} of layer {layer} is not finite")
                yield
            column += ranks[name]
    return Adapter(a_out, b_out)


def _scale(path: Path) -> float:
    """alpha / r, or alpha / sqrt(r) with rank-stabilized LoRA (arXiv 2312.03732)."""
    try:
        config: dict[str, Any] = json.loads((path / "adapter_config.json").read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"cannot read adapter_config.json of the adapter: {error!r}") from error
    if config.get("peft_type") != "LORA":
        raise EngineError(f"peft_type must be LORA, got {config.get('peft_type')!r}")
    if config.get("bias", "none") != "none":
        raise EngineError(f"the adapter's bias must be none, got {config['bias']!r}")
    for name in _MUST_BE_OFF:
        if config.get(name):
            raise EngineError(f"the adapter's {name} is not supported, got {config[name]!r}")
    if rank < 1:
        raise EngineError(f"the adapter's r must be >= 1, got {rank}")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _pairs(
    tensors: Mapping[str, Tensor], num_layers: int, parts: Mapping[str, Part]
) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """(layer, projection) -> A [r, input] and B [output, r]."""
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or match[2] not in parts or int(match[1]) >= num_layers:
            raise EngineError(f"the adapter has a weight that cannot be served: {key}")
        halves.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    for (layer, name), pair in halves.items():
        if pair.keys() != {"A", "B"}:
            raise EngineError(f"the adapter lacks one of lora_A and lora_B for {name} of layer {layer}")
    return {place: (pair["A"], pair["B"]) for place, pair in halves.items()}


@dataclass(slots=True, frozen=True)
class AdapterStack:
    """Some adapters side by side, per fused projection.

    Per layer `a` [input, R] and `b` [R, output]; `owners` [R] says which adapter each rank belongs to.
    """

    a: dict[str, list[Tensor]]
    b: dict[str, list[Tensor]]
    owners: dict[str, Tensor]


def stack_adapters(adapters: Sequence[Adapter]) -> AdapterStack:
    a: dict[str, list[Tensor]] = {}
    b: dict[str, list[Tensor]] = {}
    owners: dict[str, Tensor] = {}
    for fused in _FUSED:
        having = [(number, adapter) for number, adapter in enumerate(adapters) if fused in adapter.a]
        if not having:
            continue
        a[fused] = [layer.t() for layer in _side_by_side([adapter.a[fused] for _, adapter in having])]
        b[fused] = list(_side_by_side([adapter.b[fused] for _, adapter in having]))
        ranks = [torch.full((adapter.a[fused].shape[1],), number) for number, adapter in having]
        owners[fused] = torch.cat(ranks).to(a[fused][0].device)
    return AdapterStack(a, b, owners)


def _side_by_side(matrices: list[Tensor]) -> Tensor:
    """[layers, r, n] each -> [layers, R, n]; a single one is not copied."""
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=1)


class LoraBatch:
    """Which adapter of a stack each token of a batch uses."""

    def __init__(self, stack: AdapterStack, token_adapters: Tensor | None) -> None:
        """`token_adapters` [T] is an index into the stack or -1 for none; None: every token uses the only adapter."""
        self._stack = stack
        self._masks: dict[str, Tensor] = {}  # [T, R]
        if token_adapters is not None:
            for fused, owners in stack.owners.items():
                mask = token_adapters[:, None] == owners[None, :]
                self._masks[fused] = mask.to(stack.a[fused][0].dtype)

    def add(self, layer: int, target: str, x: Tensor, y: Tensor) -> Tensor:
        """Return y [T, output] with the adapters' contribution for x [T, input] added in place."""
        a = self._stack.a.get(target)
        if a is None:
            return y
        low = x @ a[layer]
        if (mask := self._masks.get(target)) is not None:
            low.mul_(mask)
        return y.addmm_(low, self._stack.b[target][layer])
