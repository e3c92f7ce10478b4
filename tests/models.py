"""Models that tests run on: a tiny random Llama for protocol tests, SmolLM2 for real ones."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from reef.demo.model import smollm2_directory
from reef.directories import cache_directory


@cache
def tiny_llama() -> Path:
    """A random 2-layer Llama (hidden 64, float32) with SmolLM2's tokenizer and chat template."""
    target = cache_directory() / "tiny-llama-v1"
    if not (target / "config.json").exists():
        import torch
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        tokenizer = AutoTokenizer.from_pretrained(smollm2_directory())
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=49152,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            initializer_range=0.3,  # far from uniform, so that a wrong weight shows in the log-probabilities
        )
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".tiny-llama-"))
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        try:
            scratch.rename(target)
        except OSError:  # another run of the tests was faster
            shutil.rmtree(scratch)
    return target
