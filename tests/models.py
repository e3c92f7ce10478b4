"""Models that tests run on: a tiny random Llama for protocol tests, SmolLM2 for real ones."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from reef.demo.model import smollm2_directory
from reef.directories import cache_directory


def save_random_llama(directory: Path, **sizes: Any) -> None:
    """Two layers in float32; the weights are the same each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.3,  # far from uniform, so that a wrong weight shows in the log-probabilities
        **sizes,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)


@cache
def tiny_llama() -> Path:
    """A random 2-layer Llama (hidden 64, float32) with SmolLM2's tokenizer and chat template."""
    target = cache_directory() / "tiny-llama-v1"
    if not (target / "config.json").exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(smollm2_directory())
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".tiny-llama-"))
        save_random_llama(
            scratch,
            vocab_size=49152,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        tokenizer.save_pretrained(scratch)
        try:
            scratch.rename(target)
        except OSError:  # another run of the tests was faster
            shutil.rmtree(scratch)
    return target
