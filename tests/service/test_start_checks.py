"""What a deployment refuses to start on: a data directory that its configuration does not fit."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from reef.artifact import chain
from reef.artifact.base import base_content_id
from reef.artifact.content import DirectoryContentStore
from reef.config import resolve
from reef.errors import ConfigError
from reef.records.sqlite import SqliteStorage
from reef.runtime.interfaces import Candidate, Commit, CommitKind, Evaluation, WeightKind
from tests.conftest import needs

needs("torch", "transformers", "peft")

from reef.service.deployment import Deployment  # noqa: E402
from tests.inference.references import make_adapter, make_full  # noqa: E402


@pytest.fixture
def data(tiny_model, tmp_path):
    """Three scenarios, each with an adapter of its own as its head."""
    data = tmp_path / "data"
    base, contents = base_content_id(tiny_model, data / "base-model.json"), DirectoryContentStore(data / "artifacts")
    adapters = [contents.put(make_adapter(tiny_model, tmp_path / f"{seed}", seed=seed)) for seed in range(3)]

    async def fill() -> None:
        storage = SqliteStorage(data / "reef.db")
        await storage.open()
        for name, content_id in zip("abc", adapters, strict=True):
            head = chain.base_release(name, base, 0.0)
            await storage.create_scenario(head)
            await storage.commit(trained(name, content_id, head))
        await storage.close()

    asyncio.run(fill())
    return data


def trained(scenario, content_id, head) -> Commit:
    candidate = Candidate(
        job_id=f"job-{scenario}",
        scenario=scenario,
        content_id=content_id,
        state_id=None,
        kind=WeightKind.LORA,
        runtime_load_id="engine:1",
        probe_logprobs=[],
        incumbent_probe_logprobs=[],
        metrics={},
    )
    return Commit(
        commit_id=candidate.job_id,
        scenario=scenario,
        kind=CommitKind.TRAINED,
        created_at=1.0,
        expected_head=head.release_id,
        release=chain.next_release(head, candidate, Evaluation(), 1.0),
    )


def refusal(data: Path, model: Path, **flags: object) -> str:
    """What the start says; no worker was begun, and the directory is free for the next one."""
    named = {key.replace("__", ".").replace("_", "-"): str(value) for key, value in flags.items()}
    settings = {
        "reef.data-dir": str(data),
        "inference.model-path": str(model),
        "training.backend": "torch",
        "inference.max-loads": "4",
    }
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            asyncio.run(Deployment(resolve(flags={**settings, **named}).config).start())
    assert not (data / "logs").exists()
    return str(refused.value)


def test_more_heads_than_slots(data, tiny_model):
    said = refusal(data, tiny_model, inference__max_loads=2)
    assert "inference.max-loads is 2, but 3 scenarios" in said and "set it to 4 or more" in said


def test_another_kind_of_trainer(data, tiny_model):
    said = refusal(data, tiny_model, training__mode="full")
    assert "training.mode is full, but the head of scenario 'a' is lora" in said


def test_another_base_model(data, tiny_model, tmp_path):
    other = make_full(tiny_model, tmp_path / "other", seed=9)
    for file in [*tiny_model.glob("*token*"), *tiny_model.glob("*.jinja")]:
        shutil.copy(file, other)
    assert "scenario 'a'" in (said := refusal(data, other)) and "begun on another base model" in said


def test_a_head_without_its_bytes(data, tiny_model):
    for content in (data / "artifacts").iterdir():
        if content.is_dir():
            shutil.rmtree(content)
    assert "storage.artifacts: the head of scenario 'a' is content" in refusal(data, tiny_model)
