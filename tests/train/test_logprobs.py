from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from reef.train.torch_backend import logprobs  # noqa: E402
from reef.train.torch_backend.logprobs import head_logprobs  # noqa: E402


def plain(hidden, weight, row, targets):
    table = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    entropy = -(table.exp() * table).sum(dim=-1)
    return table[row, targets], entropy[row]


@pytest.fixture(params=[1 << 30, 0], ids=["kept", "recomputed"])
def keep_bytes(request, monkeypatch):
    monkeypatch.setattr(logprobs, "KEEP_BYTES", request.param)
    monkeypatch.setattr(logprobs, "CHUNK_ROWS", 4)


@pytest.mark.usefixtures("keep_bytes")
@pytest.mark.parametrize("entropy_weight", [0.0, 0.7])
def test_values_and_gradients_are_those_of_a_plain_softmax(entropy_weight):
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    row, targets = torch.tensor([0, 0, 0, 3, 10, 10, 7]), torch.tensor([1, 1, 5, 39, 0, 2, 7])
    scale = torch.randn(7)
    results = []
    for function in (head_logprobs, plain):
        chosen, entropy = function(hidden, weight, row, targets)
        loss = (scale * chosen + entropy_weight * scale.square() * entropy).sum()
        results.append((chosen, entropy, *torch.autograd.grad(loss, (hidden, weight))))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.usefixtures("keep_bytes")
def test_bfloat16_weights_get_float32_probabilities():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8).bfloat16(), torch.randn(40, 8).bfloat16()
    row, targets = torch.arange(5), torch.arange(5)
    chosen, entropy = head_logprobs(hidden, weight, row, targets)
    expected, expected_entropy = plain(hidden, weight, row, targets)
    assert chosen.dtype == torch.float32
    assert torch.allclose(chosen, expected, atol=1e-6)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
