"""Real SGLang servers on a CPU, where `make engine-sglang` built their environment; most tests share one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reef.inference.sglang import environment
from reef.inference.sglang.backend import SGLangBackend
from reef.inference.sglang.config import SGLangConfig
from reef.runtime.interfaces import PauseMode
from tests.engines.sglang import Served, sglang_config
from tests.inference.engines import other_weights


@pytest.fixture(scope="session")
def engine_python() -> Path:
    python = environment.interpreter()
    if python is None:
        pytest.skip("SGLang's environment is not built: run `make engine-sglang`")
    return python


@pytest.fixture(scope="session")
def served(engine_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One engine that takes adapters and full weights, and runs at most eight requests at a time."""
    config = sglang_config(tiny_model, options={"max-running-requests": 8})
    logs = tmp_path_factory.mktemp("sglang")
    backend = SGLangBackend(config, mode=PauseMode.IN_PLACE, lora=True, base_content_id="base", logs=logs)
    backend.start()
    try:
        yield Served(backend, tiny_model, logs)
    finally:
        backend.close()


@pytest.fixture(scope="session")
def weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two other sets of full weights."""
    root = tmp_path_factory.mktemp("weights")
    return [other_weights(tiny_model, root / str(seed), seed) for seed in (1, 2)]


@pytest.fixture(scope="session")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters that change the answer."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("adapters")
    found = []
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        targets = list(SGLangConfig(model_path="x").lora_target_modules)
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        adapted.save_pretrained(root / str(seed))
        found.append(root / str(seed))
    return found
