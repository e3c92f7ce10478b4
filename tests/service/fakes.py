"""A small deployment for protocol tests: real storage, real chat path, a scripted engine and no trainer."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from reef.errors import NotFound, StorageError, Unavailable
from reef.inference.chat.service import ChatService
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.recipe.config import RecipeConfig
from reef.recipe.scored import ScoredRecipe
from reef.records.sqlite import SqliteStorage
from reef.runtime.interfaces import EngineReport, Recipe, Record, Release, ReleaseKind, ScenarioState
from tests.inference.chat.engines import FakeEngine


class FakeScenario:
    """Stores what it is given; its chain moves only by hand."""

    def __init__(self, state: ScenarioState, storage: SqliteStorage, recipe: Recipe) -> None:
        self.name, self.head = state.scenario, state.head
        self.recipe = recipe
        self._storage = storage
        self.calls: list[tuple[str, Any]] = []

    async def report(self, record):
        self.recipe.validate_report(record)
        return await self._storage.append(record)

    async def instruct(self, record):
        return await self._storage.append(record)

    async def contract(self) -> dict[str, Any]:
        return {"scenario": self.name, **self.recipe.contract()}

    async def status(self) -> dict[str, Any]:
        return {"scenario": self.name, "counts": await self._storage.counts(self.name)}

    async def rollback(self, release_id: str | None = None) -> Release:
        self.calls.append(("rollback", release_id))
        if release_id not in (None, self.head.release_id):
            raise NotFound(f"no release {release_id!r}")
        return self.head

    async def promote(self, source: str) -> Release:
        self.calls.append(("promote", source))
        return self.head

    async def update(self) -> dict[str, Any]:
        self.calls.append(("update", None))
        return {"started": False}


class FakeDeployment:
    provider = None

    def __init__(self, tokenizer: ChatTokenizer, directory: Path) -> None:
        self.engine = self.handler = FakeEngine(tokenizer)
        self.chat = ChatService(tokenizer, self.engine)
        self.storage = FaultyStorage(directory / "reef.db")
        self.reasons: list[str] = []
        self.data = directory
        self.trains = True
        self._recipe = ScoredRecipe(RecipeConfig())
        self._scenarios: dict[str, FakeScenario] = {}

    async def start(self) -> None:
        await self.storage.open()

    async def close(self) -> None:
        await self.storage.close()

    def admit(self) -> None:
        if self.reasons:
            raise Unavailable(self.reasons[0])

    async def engines(self) -> list[EngineReport]:
        return []

    def models(self) -> list[str]:
        return ["smollm2"]

    def scenarios(self) -> list[FakeScenario]:
        return list(self._scenarios.values())

    async def scenario(self, name: str, *, create: bool) -> FakeScenario:
        if name not in self._scenarios:
            if not create:
                raise NotFound(f"there is no scenario {name!r}")
            base = Release(
                release_id=f"rel_{uuid.uuid4().hex}",
                scenario=name,
                number=0,
                parent_id=None,
                kind=ReleaseKind.BASE,
                content_id="base",
                runtime_load_id="engine:0",
                created_at=time.time(),
            )
            state = await self.storage.create_scenario(base)
            self._scenarios[name] = FakeScenario(state, self.storage, self._recipe)
        return self._scenarios[name]

    async def health(self) -> list[str]:
        try:
            await self.storage.check()
        except StorageError as error:
            return [*self.reasons, str(error)]
        return self.reasons

    async def status(self) -> dict[str, Any]:
        return {"scenarios": [await scenario.status() for scenario in self.scenarios()]}


class FaultyStorage(SqliteStorage):
    """A real store whose disk can be made to fail."""

    full = False

    async def append(self, record: Record) -> Record:
        if self.full:
            raise StorageError("the disk is full")
        return await super().append(record)

    async def check(self) -> None:
        if self.full:
            raise StorageError("the disk is full")
        await super().check()
