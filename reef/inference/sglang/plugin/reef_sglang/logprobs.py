"""What every token reports: the weights that produced it, and its log-probability in two distributions.

`output_token_logprobs` of a response is under the model at temperature 1, before penalties, bias and grammar: what a
trainer recomputes. `meta_info.reef_drawn` is under the distribution the token was drawn from (0 when greedy).
`meta_info.reef_weights` is the runtime load ID at the time of the forward pass.
"""

from __future__ import annotations

from typing import Any

from .seeds import redraw
from .version_keys import served_weights

WEIGHTS, DRAWN = "reef_weights", "reef_drawn"


def keep_model_logits(original: Any, runner: Any, logits_output: Any, sampling_info: Any, *args: Any, **kw: Any) -> Any:
    """Around `ModelRunner._preprocess_logits`, which changes the logits in place."""
    changes = (
        sampling_info.grammars
        or sampling_info.logit_bias is not None
        or sampling_info.acc_additive_penalties is not None
        or sampling_info.acc_scaling_penalties is not None
        or (sampling_info.penalizer_orchestrator is not None and sampling_info.penalizer_orchestrator.is_required)
    )
    sampling_info.reef_model_logits = logits_output.next_token_logits.clone() if changes else None
    return original(runner, logits_output, sampling_info, *args, **kw)


def sample(original: Any, sampler: Any, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Sampler.forward`."""
    from sglang.srt.layers import sampler as module

    module.SGLANG_RETURN_ORIGINAL_LOGPROB = True
    model_logits = getattr(sampling_info, "reef_model_logits", None)
    if model_logits is not None:
        kwargs["logprob_logits"] = model_logits
    sampling_info.reef_drawn = None
    token_ids = original(sampler, logits_output, sampling_info, *args, **kwargs)
    drawn = sampling_info.reef_drawn
    num_tokens = len(token_ids)
    logits_output.customized_info = {
        **(logits_output.customized_info or {}),
        WEIGHTS: [served_weights()] * num_tokens,
        DRAWN: [0.0] * num_tokens if drawn is None else drawn.tolist(),
    }
    return token_ids


def draw(
    original: Any, sampler: Any, probs: Any, sampling_info: Any, positions: Any, simple_sampling_case: bool
) -> Any:
    """Around `Sampler._sample_from_probs`; `probs` are after temperature, [batch, vocabulary]."""
    before = probs if simple_sampling_case else probs.clone()
    kept = before if simple_sampling_case else _kept(before, sampling_info)
    result = original(sampler, probs, sampling_info, positions, simple_sampling_case)
    redraw(result[0], kept, positions, sampling_info.reef_seeds)
    chosen = before.gather(1, result[0].long().view(-1, 1)).view(-1)
    sampling_info.reef_drawn = (chosen if simple_sampling_case else chosen / kept.sum(dim=-1)).log()
    return result


def _kept(probs: Any, sampling_info: Any) -> Any:
    """What survives top-k, top-p and min-p, as SGLang's torch sampler applies them; the rest is 0. [batch, vocab]"""
    import torch

    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ranks = torch.arange(ordered.shape[-1], device=probs.device).view(1, -1)
    kept = (ranks < sampling_info.top_ks.view(-1, 1)) & (before <= sampling_info.top_ps.view(-1, 1))
    if sampling_info.need_min_p_sampling:
        kept &= ordered >= (ordered[:, 0] * sampling_info.min_ps).view(-1, 1)
    return torch.zeros_like(probs).scatter(1, order, ordered * kept)
