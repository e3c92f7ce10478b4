"""Nothing of the engine mixes devices. Tried on torch's `meta` device, which has no values but is not the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from reef.inference.local.attention import KVTensors, Stretch, plan_dense, plan_paged  # noqa: E402
from reef.inference.local.lora import Adapter, LoraBatch, stack_adapters  # noqa: E402
from reef.inference.local.model import Batch, Model, ModelSpec  # noqa: E402
from reef.inference.local.native import make_ops  # noqa: E402
from reef.inference.local.ops import Ops  # noqa: E402
from reef.inference.local.sampler import Row, _adjust, _choose  # noqa: E402
from reef.inference.local.slices import whole  # noqa: E402
from reef.inference.local.weights import build_weights, read_config, read_state  # noqa: E402
from reef.runtime.interfaces import SamplingParams  # noqa: E402

ELSEWHERE = torch.device("meta")
PAGE = 4
STRETCHES = [  # two that decode, of very different lengths; one that begins; one that goes on
    Stretch(0, 1, 5, [1, 2]),
    Stretch(1, 1, 60, list(range(3, 19))),
    Stretch(2, 6, 0, [20, 21]),
    Stretch(8, 5, 8, [22, 23, 24, 25]),
]
TOKENS = 13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_stays_on_the_device(tiny_model, monkeypatch, dtype):
    spec, state = ModelSpec.from_config(read_config(tiny_model)), whole(read_state(tiny_model))
    monkeypatch.setattr(torch.Tensor, "isfinite", lambda self: SimpleNamespace(all=lambda: True))  # needs values
    ops = make_ops("auto", ELSEWHERE, spec.head_dim)
    assert type(ops) is Ops, "Reef's own kernels are for the CPU"
    weights = whole(build_weights(state, spec, dtype, ELSEWHERE, ops))
    model = Model(spec, dtype, ELSEWHERE, 128, ops)
    kv = KVTensors(
        num_layers=spec.num_layers,
        num_pages=32,
        page_size=PAGE,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=ELSEWHERE,
    )
    ids = torch.zeros(TOKENS, dtype=torch.long, device=ELSEWHERE)
    numbers = torch.from_numpy(np.zeros(TOKENS, dtype=np.int64)).to(ELSEWHERE)
    batch = Batch(
        token_ids=ids,
        positions=ids,
        attention=plan_paged(STRETCHES, kv, ops.row_tables_up_to),
        lora=LoraBatch(stack_adapters([adapter(spec, dtype)] * 2), numbers),
    )
    for plan in (batch.attention, plan_dense(TOKENS)):
        batch.attention = plan
        hidden = model.forward(weights, batch)
        assert (hidden.device, hidden.dtype, hidden.shape) == (ELSEWHERE, dtype, (TOKENS, spec.hidden_size))
    assert weights.lm_head(hidden).device == ELSEWHERE
    kv.clear([1, 2])


def adapter(spec: ModelSpec, dtype: torch.dtype) -> Adapter:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=ELSEWHERE)

    sizes = spec.fused_sizes.items()
    return Adapter(
        {name: zeros(spec.num_layers, 6, inputs) for name, (_, inputs) in sizes},
        {name: zeros(spec.num_layers, 6, outputs) for name, (outputs, _) in sizes},
    )


def test_sampling_stays_on_the_device():
    counts = np.zeros(600, dtype=np.int32)
    counts[3] = 2
    params = [
        SamplingParams(min_p=0.01, logit_bias={4: 1.0}),
        SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.1, repetition_penalty=1.2),
    ]
    rows = [Row(one, 7, 11, [1, 2, 3], counts) for one in params]
    logits = torch.zeros(2, 600, device=ELSEWHERE)
    tokens, drawn = _choose(_adjust(logits, rows), rows)
    assert tokens.device == drawn.device == ELSEWHERE and tokens.shape == drawn.shape == (2,)
