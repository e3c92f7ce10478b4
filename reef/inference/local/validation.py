"""What the engine refuses before a request enters it."""

from __future__ import annotations

import math

from reef.errors import InvalidRequest
from reef.runtime.interfaces import GenerateRequest, SamplingParams


def check_request(request: GenerateRequest, *, vocab_size: int, max_context: int) -> None:
    """Raises InvalidRequest naming the field."""
    prompt = request.prompt_ids
    if not prompt:
        raise InvalidRequest("prompt_ids must have at least 1 token, got none", "prompt_ids")
    _check_ids(prompt, vocab_size, "prompt_ids")
    sampling = request.sampling
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be >= 1, got {sampling.max_tokens}", "sampling.max_tokens")
    if len(prompt) >= max_context:
        raise InvalidRequest(
            f"the prompt must be shorter than the context of {max_context} tokens, got {len(prompt)}", "prompt_ids"
        )
    if len(prompt) + sampling.max_tokens > max_context:
        raise InvalidRequest(
            f"max_tokens must be <= {max_context - len(prompt)} with this prompt: the context is {max_context} tokens,"
            f" got {sampling.max_tokens}",
            "sampling.max_tokens",
        )
    check_sampling(sampling, vocab_size)


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest naming the field."""
    bounds = (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("top_k", 0, math.inf),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -math.inf, math.inf),
        ("frequency_penalty", -math.inf, math.inf),
        ("repetition_penalty", 0.0, math.inf),
        ("top_logprobs", 0, vocab_size),
    )
    for name, low, high in bounds:
        value = getattr(sampling, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequest(f"{name} must be in [{low}, {high}], got {value}", f"sampling.{name}")
    for name in ("top_p", "repetition_penalty"):
        if getattr(sampling, name) == 0:
            raise InvalidRequest(f"{name} must be > 0, got 0", f"sampling.{name}")
    _check_ids(sampling.stop_token_ids, vocab_size, "sampling.stop_token_ids")
    _check_ids(list(sampling.logit_bias), vocab_size, "sampling.logit_bias")
    for token_id, bias in sampling.logit_bias.items():
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias must be finite, got {bias} for token {token_id}", "sampling.logit_bias")
    if not all(sampling.stop):
        raise InvalidRequest("stop strings must not be empty", "sampling.stop")


def _check_ids(token_ids: list[int], vocab_size: int, field: str) -> None:
    wrong = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if wrong:
        raise InvalidRequest(f"token ids must be in [0, {vocab_size}), got {wrong[0]}", field)
