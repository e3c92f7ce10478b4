"""Nothing of the engine's model mixes devices: every kernel is tried on fake CUDA tensors, which only have a place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from reef.inference.local.attention import KVTensors, Stretch, plan_dense, plan_paged  # noqa: E402
from reef.inference.local.lora import AdapterStack, LoraBatch  # noqa: E402
from reef.inference.local.model import Batch, Model, ModelSpec  # noqa: E402
from reef.inference.local.ops import Ops  # noqa: E402
from reef.inference.local.weights import build_weights, read_config, read_state  # noqa: E402

PAGE = 4
STRETCHES = [  # two that decode, of very different lengths; one that begins; one that goes on
    Stretch(0, 1, 5, [1, 2]),
    Stretch(1, 1, 60, list(range(3, 19))),
    Stretch(2, 6, 0, [20, 21]),
    Stretch(8, 5, 8, [22, 23, 24, 25]),
]


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return ModelSpec.from_config(read_config(tiny_model)), read_state(tiny_model)


@pytest.fixture
def cuda(loaded, monkeypatch):
    """Tensors on a CUDA device that nobody has."""
    monkeypatch.setattr(torch.Tensor, "isfinite", lambda self: SimpleNamespace(all=lambda: True))  # reads values
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_stays_on_the_device(loaded, cuda, dtype):
    spec, state = loaded
    ops = Ops()
    weights = build_weights(state, spec, dtype, cuda, ops)
    model = Model(spec, dtype, cuda, 128, ops)
    kv = KVTensors(
        num_layers=spec.num_layers,
        num_pages=32,
        page_size=PAGE,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=cuda,
    )
    stack = AdapterStack(
        {name: [torch.zeros(inp, 6, dtype=dtype, device=cuda)] * 2 for name, (_, inp) in spec.fused_sizes.items()},
        {name: [torch.zeros(6, out, dtype=dtype, device=cuda)] * 2 for name, (out, _) in spec.fused_sizes.items()},
        {name: torch.zeros(6, dtype=torch.long, device=cuda) for name in spec.fused_sizes},
    )
    lora = LoraBatch(stack, torch.zeros(13, dtype=torch.long, device=cuda))
    batch = Batch(
        token_ids=torch.zeros(13, dtype=torch.long, device=cuda),
        positions=torch.zeros(13, dtype=torch.long, device=cuda),
        attention=plan_paged(STRETCHES, kv, ops.row_tables_up_to),
        lora=lora,
    )
    hidden = model.forward(weights, batch)
    assert hidden.device.type == "cuda" and hidden.dtype == dtype and hidden.shape == (13, spec.hidden_size)
    batch.attention = plan_dense(13)
    assert weights.lm_head(model.forward(weights, batch)).device.type == "cuda"
    kv.clear([1, 2])
