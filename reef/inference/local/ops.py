"""The operations of the model between which LoRA steps in, on any device that torch knows.

`native.NativeOps` does the same with kernels of its own on a CPU. Shapes: T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from reef.inference.local.attention import AttentionPlan, attend

Linear = Callable[[Tensor], Tensor]
"""[T, input] -> [T, output]"""

_ONEDNN_BFLOAT16: bool = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Not without AVX-512 or AVX-NE-CONVERT; torch's own product does it there."""


class Ops:
    """Plain torch."""

    row_tables_up_to = 0
    """Sequences with at most so many new tokens are planned as `RowTables`."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """y = x W^T + b with `weight` [output, input] in whatever layout is fast here."""
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _ONEDNN_BFLOAT16:
            # oneDNN's own layout is about twice as fast for few tokens.
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return lambda x: F.linear(x, weight, bias)

    def release(self) -> None:
        """Forget what was kept for weights that are gone."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `x` [T, H] in place; return x / rms(x) * weight."""
        if delta is not None:
            x += delta
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * size] -> silu(first half) * second half [T, size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate_store(
        self,
        heads: Tensor,
        num_kv_heads: int,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        layer: int,
        plan: AttentionPlan,
    ) -> None:
        """Rotate q and k in place, first half of a head against its second; store k and v.

        `heads` [T, q heads + 2 KV heads, D]; `cos`, `sin` [positions, D / 2].
        """
        turned = heads[:, :-num_kv_heads]
        first, second = turned.chunk(2, dim=-1)
        row_cos, row_sin = cos[positions][:, None], sin[positions][:, None]
        turned.copy_(torch.cat((first * row_cos - second * row_sin, second * row_cos + first * row_sin), dim=-1))
        if plan.kv is not None:
            assert plan.slots is not None
            pages, offsets = plan.slots // plan.kv.page_size, plan.slots % plan.kv.page_size
            plan.kv.keys[layer][pages, :, offsets] = heads[:, -2 * num_kv_heads : -num_kv_heads]
            plan.kv.values[layer][pages, :, offsets] = heads[:, -num_kv_heads:]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
        """q [T, heads, D], k and v [T, kv_heads, D], stored already -> [T, heads, D]."""
        return attend(q, k, v, layer, plan)
