from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from transformers import AutoModelForCausalLM  # noqa: E402

from reef.errors import ConfigError  # noqa: E402
from reef.train.torch_backend import attention, packing  # noqa: E402
from reef.train.torch_backend.config import TorchConfig  # noqa: E402
from reef.train.torch_backend.model import Policy  # noqa: E402
from reef.train.torch_backend.packing import pack  # noqa: E402
from reef.train.torch_backend.step import collect_tokens  # noqa: E402
from tests.train.batches import PROBE, rollouts  # noqa: E402


def make(tiny_model, **config) -> Policy:
    torch.set_num_threads(1)
    return Policy(tiny_model, TorchConfig(dtype="float32", **config))


def perturb(policy: Policy) -> None:
    """Move an adapter away from zero."""
    torch.manual_seed(3)
    with torch.no_grad():
        for master in policy.masters.values():
            master.add_(0.05 * torch.randn_like(master))
    policy.synchronize()


def one_by_one(policy: Policy, samples):
    """What the model itself says of each sample alone, unpadded, with its own attention."""
    policy.causal.set_attn_implementation("sdpa")
    rows = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.output_ids])
        logits = policy.causal(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].float()
        rows.append(torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(sample.output_ids)[:, None]).squeeze(1))
    policy.causal.set_attn_implementation(attention.NAME)
    return torch.cat(rows)


def packed(policy: Policy, samples, budget: int):
    tokens = collect_tokens(samples, 49152, 4096)
    result = torch.zeros(len(tokens.advantages))
    for batch in pack(tokens.sequences, budget):
        result = result.index_copy(0, torch.from_numpy(batch.slots), policy.forward(batch)[0])
    return result


def gradients(policy: Policy, logprobs) -> dict:
    policy.drop_gradients()
    torch.manual_seed(0)
    (torch.randn(len(logprobs)) * logprobs).sum().backward()
    policy.collect_gradients()
    return {name: master.grad.clone() for name, master in policy.masters.items()}


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize(
    ("small", "dense", "budget"), [(256, 192, 2048), (256, 192, 40), (256, 4, 2048), (0, 192, 2048), (0, 4, 2048)]
)
def test_packed_is_one_by_one(tiny_model, monkeypatch, mode, small, dense, budget):
    monkeypatch.setattr(attention, "SMALL_BLOCK_TOKENS", small)
    monkeypatch.setattr(packing, "DENSE_BLOCK_TOKENS", dense)
    monkeypatch.setattr(packing, "MERGED_BLOCK_TOKENS", min(dense, 64))
    policy = make(tiny_model, mode=mode)
    perturb(policy)
    samples = rollouts()
    ours, theirs = packed(policy, samples, budget), one_by_one(policy, samples)
    assert (ours - theirs).abs().max() < 1e-4
    found, expected = gradients(policy, ours), gradients(policy, theirs)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-4 * float(gradient.abs().max())), name


def test_gradient_checkpointing_changes_nothing(tiny_model):
    policy, saving = make(tiny_model), make(tiny_model, gradient_checkpointing=True)
    perturb(policy)
    perturb(saving)
    samples = rollouts()
    expected, found = (gradients(p, packed(p, samples, 2048)) for p in (policy, saving))
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)


def test_score_is_the_model_s_own(tiny_model):
    policy = make(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.tensor([PROBE])
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
    expected = table.gather(1, ids[0, 1:, None]).squeeze(1)
    assert torch.allclose(torch.tensor(policy.score(PROBE)), expected, atol=1e-4)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_base_logprobs_ignore_what_was_trained(tiny_model, mode):
    policy = make(tiny_model, mode=mode)
    (batch,) = pack(collect_tokens(rollouts(), 49152, 4096).sequences, 2048)
    before = policy.forward(batch)[0].detach()
    perturb(policy)
    assert (policy.forward(batch)[0] - before).abs().max() > 0.01
    assert torch.allclose(policy.base_logprobs(batch), before, atol=1e-5)
    assert all(parameter.requires_grad for parameter in policy.parameters.values())


def test_a_fresh_adapter_depends_on_the_seed_alone(tiny_model):
    torch.manual_seed(123)
    first = make(tiny_model, seed=4)
    torch.manual_seed(456)
    second, other = make(tiny_model, seed=4), make(tiny_model, seed=5)
    name = next(name for name in first.masters if "lora_A" in name)
    assert torch.equal(first.masters[name], second.masters[name])
    assert not torch.equal(first.masters[name], other.masters[name])
    assert all(not master.any() for name, master in first.masters.items() if "lora_B" in name)


def test_bfloat16_keeps_float32_masters(tiny_model):
    policy = Policy(tiny_model, TorchConfig(dtype="bfloat16"))
    assert {parameter.dtype for parameter in policy.parameters.values()} == {torch.bfloat16}
    assert {master.dtype for master in policy.masters.values()} == {torch.float32}
    name = next(iter(policy.masters))
    policy.masters[name].data.fill_(1.0 + 2.0**-12)
    policy.synchronize()
    assert policy.masters[name].flatten()[0].item() == 1.0 + 2.0**-12
    assert policy.parameters[name].flatten()[0].item() == 1.0


def test_unknown_target_modules_are_refused(tiny_model):
    with pytest.raises(ConfigError, match="lora-target-modules"):
        make(tiny_model, lora_target_modules=("c_attn",))


def test_a_model_with_scaled_logits_is_refused(tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        logits_scaling=4.0,
        initializer_range=0.5,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="GraniteForCausalLM cannot be trained"):
        make(tmp_path)
