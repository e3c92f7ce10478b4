"""Every supported architecture against transformers, on tiny random models; what is not supported is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from reef.errors import EngineError
from reef.inference.local.model import ModelSpec
from reef.runtime.interfaces import Ending
from tests.inference.references import (
    engine,
    far,
    full_load,
    reference_greedy,
    reference_logprobs,
    reference_model,
    request,
    run,
)

SIZES = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama head": LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True),
    "llama odd head": LlamaConfig(**{**SIZES, "hidden_size": 48}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral window": MistralConfig(**SIZES, sliding_window=64),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
}


def random_model(config: Any, path: Path) -> Path:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_architecture(tmp_path, name, kernels):
    path = random_model(CONFIGS[name], tmp_path)
    model = reference_model(path)
    tested = engine(path, kernels=kernels)
    length = 40 if name == "mistral window" else 150
    prompt = torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    answer = run(tested, [request("a", prompt)])["a"]
    assert answer.token_ids == reference_greedy(model, prompt, 12)
    assert far(answer.logprobs, reference_logprobs(model, prompt, answer.token_ids)) < 1e-4


def test_a_window_bounds_the_context(tmp_path):
    tested = engine(random_model(CONFIGS["mistral window"], tmp_path))
    assert tested.max_context == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type",
        ),
    ],
)
def test_unsupported_models_are_refused(changes, message):
    options = dict(changes)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with pytest.raises(EngineError, match=message):
        ModelSpec.from_config(config)


def test_weights_that_overflow_cut_their_requests_only(tmp_path):
    """Finite weights, infinite activations: its requests end, and what they leave in freed pages harms nobody."""
    base = random_model(CONFIGS["llama"], tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e38)
    model.save_pretrained(tmp_path / "broken")
    tested = engine(base, kv_cache_tokens=64, max_context=32, kernels="torch")
    tested.stage(full_load("engine:1", tmp_path / "broken"))
    alone = run(tested, [request("good", [5, 6, 7, 8, 9, 10, 11, 12, 13])])["good"]
    tested.flush()
    prompts = {"bad": "engine:1", "good": None}
    both = [request(name, [5, 6, 7, 8, 9, 10, 11, 12, 13], load=load) for name, load in prompts.items()]
    for _ in range(3):
        answers = run(tested, both)
        assert answers["bad"].ending is Ending.ENGINE_CUT
        assert "not finite" in (answers["bad"].error or "")
        assert answers["good"].token_ids == alone.token_ids
    tested.flush()
    assert tested.report().free_pages == tested.report().total_pages
