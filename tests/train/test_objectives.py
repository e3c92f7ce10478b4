from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from reef.runtime.interfaces import Objective  # noqa: E402
from reef.train.objectives import TokenBatch, kl, lookup, token_weights  # noqa: E402

LN2 = math.log(2.0)


def batch(logprobs, old, advantages, *, weights=None, base=None, entropy=None) -> TokenBatch:
    logprobs = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    count = len(old)
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=torch.tensor(old, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights or [1.0 / count] * count, dtype=torch.float64),
        entropy=torch.tensor(entropy or [0.0] * count, dtype=torch.float64, requires_grad=True),
        base_logprobs=None if base is None else torch.tensor(base, dtype=torch.float64),
    )


def value_and_gradient(name: str, tokens: TokenBatch, **params) -> tuple[float, list[float], dict[str, float]]:
    loss, metrics = lookup(Objective(name, params))(tokens)
    loss.backward()
    return loss.item(), tokens.logprobs.grad.tolist(), metrics


def test_token_weights_by_token():
    weights = token_weights(torch.tensor([0, 0, 0, 1]), "token", mask=torch.tensor([True, True, False, True]))
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 3, 0.0, 1 / 3])


def test_token_weights_by_sequence():
    weights = token_weights(torch.tensor([0, 0, 0, 2]), "sequence")
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


def test_token_weights_ignore_a_masked_sequence():
    weights = token_weights(torch.tensor([0, 1, 1]), "sequence", mask=torch.tensor([True, False, False]))
    assert weights.tolist() == [1.0, 0.0, 0.0]


def test_policy_gradient_on_policy_is_reinforce():
    loss, gradient, metrics = value_and_gradient("policy_gradient", batch([-1.0, -2.0], [-1.0, -2.0], [3.0, -1.0]))
    assert loss == pytest.approx(-1.0)
    assert gradient == pytest.approx([-1.5, 0.5])
    assert metrics["clip_fraction"] == 0.0


def test_policy_gradient_weighs_by_the_ratio():
    loss, gradient, _ = value_and_gradient("policy_gradient", batch([-1.0 + LN2], [-1.0], [3.0]))
    assert loss == pytest.approx(-6.0)
    assert gradient == pytest.approx([-6.0])


def test_ppo_clips_only_where_the_step_would_go_on():
    # ratios 2, 2, 1/2, 1/2 with advantages +, -, +, -: the first and the last have gone far enough
    tokens = batch([LN2, LN2, -LN2, -LN2], [0.0] * 4, [1.0, -1.0, 1.0, -1.0])
    loss, gradient, metrics = value_and_gradient("policy_gradient", tokens, clip="ppo", clip_low=0.2, clip_high=0.3)
    assert loss == pytest.approx(-(1.3 - 2.0 + 0.5 - 0.8) / 4)
    assert gradient == pytest.approx([0.0, 2.0 / 4, -0.5 / 4, 0.0])
    assert metrics["clip_fraction"] == pytest.approx(0.5)


def test_cispo_keeps_a_bounded_gradient_for_clipped_tokens():
    tokens = batch([-1.0 + LN2, -1.0 - LN2, -1.0], [-1.0] * 3, [1.0, 1.0, 1.0])
    loss, gradient, metrics = value_and_gradient("policy_gradient", tokens, clip="cispo", clip_low=0.2, clip_high=0.3)
    assert loss == pytest.approx(-(1.3 * (-1.0 + LN2) + 0.8 * (-1.0 - LN2) - 1.0) / 3)
    assert gradient == pytest.approx([-1.3 / 3, -0.8 / 3, -1.0 / 3])
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)


def test_entropy_bonus_lowers_the_loss():
    tokens = batch([-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0], entropy=[2.0, 4.0])
    loss, _, _ = value_and_gradient("policy_gradient", tokens, entropy_coefficient=0.1)
    assert loss == pytest.approx(-0.3)
    assert tokens.entropy.grad.tolist() == pytest.approx([-0.05, -0.05])


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", LN2, 1.0), ("k2", LN2**2 / 2, LN2), ("k3", 0.5 - 1.0 + LN2, 0.5)],
)
def test_kl_to_the_base(estimator, value, slope):
    tokens = batch([-1.0], [-1.0], [0.0], base=[-1.0 - LN2])
    loss, gradient, _ = value_and_gradient("policy_gradient", tokens, kl_coefficient=0.5, kl_estimator=estimator)
    assert loss == pytest.approx(0.5 * value)
    assert gradient == pytest.approx([0.5 * slope])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_kl_estimates_average_to_the_kl(estimator):
    torch.manual_seed(0)
    policy, reference = torch.log_softmax(torch.randn(2, 50, dtype=torch.float64), dim=-1)
    exact = (policy.exp() * (policy - reference)).sum()
    average = (policy.exp() * kl.estimate(policy, reference, estimator)).sum()
    assert average.item() == pytest.approx(exact.item())


def test_k2_has_the_gradient_of_the_kl():
    torch.manual_seed(0)
    logits = torch.randn(50, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(50, dtype=torch.float64), dim=-1)
    policy = torch.log_softmax(logits, dim=-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (ours,) = torch.autograd.grad((policy.exp().detach() * kl.estimate(policy, reference, "k2")).sum(), logits)
    assert torch.allclose(ours, exact)


def test_kl_objective():
    loss, gradient, _ = value_and_gradient("kl", batch([-1.0], [-1.0], [9.0], base=[-3.0]), coefficient=2.0)
    assert (loss, gradient) == (pytest.approx(4.0), pytest.approx([4.0]))


def test_cross_entropy_weighs_by_the_advantages():
    loss, gradient, _ = value_and_gradient("cross_entropy", batch([-1.0, -2.0], [0.0, 0.0], [1.0, 0.5]))
    assert loss == pytest.approx(1.0)
    assert gradient == pytest.approx([-0.5, -0.25])


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("policy_gradient", {}),
        ("policy_gradient", {"clip": "ppo"}),
        ("policy_gradient", {"kl_coefficient": 0.3, "kl_estimator": "k1"}),
        ("policy_gradient", {"kl_coefficient": 0.3, "kl_estimator": "k2"}),
        ("policy_gradient", {"kl_coefficient": 0.3, "kl_estimator": "k3", "clip": "ppo"}),
        ("policy_gradient", {"entropy_coefficient": 0.2}),
        ("cross_entropy", {}),
        ("kl", {"estimator": "k3"}),
    ],
)
def test_gradients_are_those_of_finite_differences(name, params):
    torch.manual_seed(1)
    old, advantages, base, entropy = torch.randn(4, 6, dtype=torch.float64)
    loss = lookup(Objective(name, params))

    def compute(logprobs, entropy):
        weights = torch.full((6,), 1 / 6, dtype=torch.float64)
        tokens = TokenBatch(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=advantages,
            weights=weights,
            entropy=entropy,
            base_logprobs=base,
        )
        return loss(tokens)[0]

    start = (old + 0.3 * torch.randn(6, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(compute, (start, entropy.clone().requires_grad_()))


def test_an_unknown_objective_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown objective 'ppo'; known: policy_gradient"):
        lookup(Objective("ppo"))


def test_an_unknown_parameter_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="no parameter 'clip_hi'; did you mean 'clip_high'"):
        lookup(Objective("policy_gradient", {"clip_hi": 0.2}))


def test_hyphens_are_underscores():
    assert lookup(Objective("policy_gradient", {"kl-coefficient": 1})).params.needs_base


@pytest.mark.parametrize(("name", "value"), [("clip", "hard"), ("clip_low", 1.5), ("kl_coefficient", "much")])
def test_a_parameter_out_of_bounds_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"\$\.{name}"):
        lookup(Objective("policy_gradient", {name: value}))
