"""The CPU kernels against torch's operations."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from reef.inference.local.attention import AttentionPlan, KVTensors, Stretch, plan_paged
from reef.inference.local.native import NativeOps, _Slabs, make_ops
from reef.inference.local.ops import Ops

CPU = torch.device("cpu")
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def native() -> Ops:
    ops = make_ops("auto", CPU, 64)
    if not isinstance(ops, NativeOps):
        pytest.skip("no C++ compiler with OpenMP here")
    return ops


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    tolerance = DTYPES[left.dtype]
    return torch.allclose(left.float(), right.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_add_norm(native, dtype, tokens):
    x, delta, weight = (random(tokens, 576, dtype=dtype, seed=seed) for seed in range(3))
    left, right = x.clone(), x.clone()
    for change in (None, delta):
        assert close(native.add_norm(left, change, weight[0], 1e-5), Ops().add_norm(right, change, weight[0], 1e-5))
        assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_silu_mul(native, dtype):
    gate_up = random(17, 2 * 1000, dtype=dtype) * 20
    assert close(native.silu_mul(gate_up), Ops().silu_mul(gate_up))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 8, 9, 16, 31, 70])
def test_linear(native, tokens, bias, dtype):
    weight, x = random(96, 320, dtype=dtype), random(tokens, 320, dtype=dtype, seed=1)
    added = random(96, dtype=dtype, seed=2) if bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    got = native.linear(weight, added)(x)
    relative, absolute = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 2e-2)}[dtype]
    assert torch.allclose(got.double(), exact, rtol=relative, atol=absolute)


def test_linear_takes_sizes_that_do_not_fit_its_blocks(native):
    weight, x = random(33, 17, dtype=torch.bfloat16), random(5, 17, dtype=torch.bfloat16, seed=1)
    assert close(native.linear(weight, None)(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("tokens", [5, 16, 19, 60])
def test_a_row_does_not_depend_on_its_batch(native, tokens, dtype):
    if dtype is torch.bfloat16 and dtype not in native._linear:
        pytest.skip("this processor does not multiply bfloat16")
    weight, x = random(96, 320, dtype=dtype), random(tokens, 320, dtype=dtype, seed=1)
    linear = native.linear(weight, None)
    assert torch.equal(linear(x), torch.cat([linear(row) for row in x.split(1)]))


def test_weights_share_slabs_and_do_not_overlap():
    slabs = _Slabs()
    sources = [random(size, 3, dtype=torch.bfloat16, seed=size) for size in (7, 500_000, 11, 3_000_000, 5)]
    kept = [slabs.keep(source) for source in sources]
    assert all(torch.equal(left, right) for left, right in zip(kept, sources, strict=True))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in kept)
    assert kept[0].untyped_storage().data_ptr() == kept[2].untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 128), (7, 1, 32), (10, 2, 80)])
def test_rotation_and_attention(native, dtype, heads, kv_heads, dim):
    """Three decodes and a short prefill over pages that are out of order."""
    stretches = [
        Stretch(0, 1, 0, [9]),
        Stretch(1, 1, 18, [3, 7, 1]),
        Stretch(2, 1, 39, [2, 8, 4, 10, 6]),
        Stretch(3, 5, 6, [11, 5]),
    ]
    qkv = random(8, heads + 2 * kv_heads, dim, dtype=dtype)
    positions = torch.tensor([0, 18, 39, 6, 7, 8, 9, 10])
    cos, sin = random(64, dim // 2, dtype=dtype, seed=3), random(64, dim // 2, dtype=dtype, seed=4)
    results = []
    for ops in (native, Ops()):
        kv = KVTensors(
            num_layers=2, num_pages=11, page_size=8, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, device=CPU
        )
        kv.keys[1].copy_(random(12, kv_heads, 8, dim, dtype=dtype, seed=5))
        kv.values[1].copy_(random(12, kv_heads, 8, dim, dtype=dtype, seed=6))
        plan = plan_paged(stretches, kv, ops.row_tables_up_to)
        own = qkv.clone()
        ops.rotate_store(own, kv_heads, cos, sin, positions, 1, plan)
        q, k, v = own.split([heads, kv_heads, kv_heads], dim=1)
        results.append((own, kv.keys[1], kv.values[1], ops.attend(q, k, v, 1, plan)))
        assert not kv.keys[0].any(), "another layer's memory was written"
    for left, right in zip(*results, strict=True):
        assert close(left, right)


def test_rotation_without_a_cache(native):
    qkv = random(4, 6, 16, dtype=torch.float32)
    cos, sin = random(8, 8, dtype=torch.float32, seed=1), random(8, 8, dtype=torch.float32, seed=2)
    left, right = qkv.clone(), qkv.clone()
    for ops, own in ((native, left), (Ops(), right)):
        ops.rotate_store(own, 1, cos, sin, torch.arange(4), 0, AttentionPlan(None))
    assert close(left, right)


def test_torch_is_used_where_kernels_are_not(monkeypatch, tmp_path):
    from reef.inference.local import native as module

    assert type(make_ops("torch", CPU, 64)) is Ops
    assert type(make_ops("auto", CPU, 60)) is Ops
    monkeypatch.setenv("REEF_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    module._library.cache_clear()
    try:
        assert type(make_ops("auto", CPU, 64)) is Ops
    finally:
        module._library.cache_clear()
