"""Assembles one deployment from its configuration: storage, engines, trainer, coordinator, scenarios."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from reef import __version__
from reef.artifact import chain
from reef.artifact.base import base_content_id
from reef.artifact.content import DirectoryContentStore
from reef.errors import ConfigError, NotFound, StorageError
from reef.inference.chat.service import ChatService
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.inference.local.backend import LocalBackend
from reef.inference.local.client import LocalHandler
from reef.recipe.lookup import build_evaluator, build_recipe
from reef.records.lock import DirectoryLock
from reef.records.sqlite import SqliteStorage
from reef.runtime.deployment import CoordinatorRuntime
from reef.runtime.interfaces import (
    Candidate,
    CandidateSampler,
    InferenceHandler,
    MarkerState,
    PauseMode,
    Release,
    SamplingParams,
    Storage,
    TrainingBackend,
)
from reef.runtime.publication import Publication, probe_ids
from reef.runtime.recovery import MarkerFile
from reef.runtime.scheduler import TrainingCoordinator
from reef.scenario.scenario import Scenario
from reef.scenario.steps import Services
from reef.service.config import NoTraining, ReefConfig
from reef.service.workplace import ENGINE, TRAINER, Workplace
from reef.train.torch_backend.backend import TorchBackend

log = logging.getLogger("reef.service")

TORCH_WORKER = "reef.train.torch_backend.worker:TorchWorker"
KEPT_REJECTED = 20  # newest commits whose rejected candidates stay on disk
KEPT_STATES = 3  # optimizer states of the newest releases of a scenario
HEALTH_SECONDS = 1.0  # a durable write proves the store at most this often


class PinnedSampler(CandidateSampler):
    """Asks the engines under pinned weights: the staged candidate, or the incumbent that serves."""

    def __init__(self, chat: ChatService, candidate: str, incumbent: str) -> None:
        self._chat = chat
        self._loads = {True: candidate, False: incumbent}

    async def chat(self, messages: list[dict[str, Any]], sampling: SamplingParams, *, candidate: bool) -> str:
        return await self._chat.complete(messages, sampling, runtime_load_id=self._loads[candidate])


class Deployment:
    """What the HTTP layer serves. Built stopped; `start` brings it to the last committed releases."""

    def __init__(self, config: ReefConfig) -> None:
        self.config = config
        self.data = Path(config.reef.data_dir)
        self.started_at = time.time()
        self._lock = DirectoryLock(self.data)
        self._workplace = Workplace(config.execution, config.inference, config.training, self.data / "logs")
        self._scenarios: dict[str, Scenario] = {}
        self._creating = asyncio.Lock()
        self._checked = (0.0, "")  # when the store was last proven, and what was wrong with it
        self._opened = AsyncExitStack()

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Open, start, recover. Raises what failed, with everything closed again."""
        async with AsyncExitStack() as opened:
            self._lock.acquire()
            opened.callback(self._lock.release)
            MarkerFile(self.data / "marker.json").read()  # a damaged one is said before the models are loaded
            await self._build()
            await asyncio.to_thread(self._workplace.open)
            opened.push_async_callback(asyncio.to_thread, self._workplace.close)
            await self.storage.open()
            opened.push_async_callback(self.storage.close)
            await self._check_chain()
            opened.push_async_callback(self._runtime.close)
            await self._runtime.start()
            opened.push_async_callback(self._close_scenarios)
            await self._recover()
            self._runtime.watch()
            self._opened = opened.pop_all()

    async def _build(self) -> None:
        config, data = self.config, self.data
        model = Path(config.inference.model_path)
        base = await asyncio.to_thread(base_content_id, model, data / "base-model.json")
        self.storage: Storage = SqliteStorage(
            Path(config.storage.path or data / "reef.db"),
            busy_timeout=config.storage.busy_timeout,
            read_threads=config.storage.read_threads,
        )
        self._contents = contents = DirectoryContentStore(data / "artifacts")
        engines = LocalBackend(config.inference, partial(self._workplace.executor, ENGINE), base_content_id=base)
        self.handler: InferenceHandler = LocalHandler(engines.socket_paths)
        formats = config.inference.tool_format, config.inference.reasoning_format
        tokenizer = await asyncio.to_thread(ChatTokenizer.load, model, *formats)
        self.chat = ChatService(tokenizer, self.handler)
        probe = probe_ids(tokenizer.vocab_size)
        pause_mode = PauseMode(config.inference.pause_mode)
        self._publication = Publication(engines, contents, pause_mode, base, probe)
        trainer = self._trainer()
        coordinator = TrainingCoordinator(trainer, self._publication, contents, MarkerFile(data / "marker.json"))
        self._runtime = CoordinatorRuntime(coordinator, self._publication, engines, trainer, self.handler)
        self._services = Services(
            storage=self.storage,
            contents=contents,
            runtime=self._runtime,
            recipe=build_recipe(config.recipe),
            evaluator=build_evaluator(config.evaluation, self._runtime),
            sampler=self._sampler,
            turn=asyncio.Lock(),
            scratch=data / "candidates",
            base_content_id=base,
            probe_ids=probe,
            released=self._collect_garbage,
        )
        self._base = base

    def _trainer(self) -> TrainingBackend | None:
        training = self.config.training
        if isinstance(training, NoTraining):
            return None
        arguments = {"model_path": self.config.inference.model_path, "config": training}
        return TorchBackend(training, partial(self._workplace.executor, TRAINER, TORCH_WORKER, [arguments]))

    def _sampler(self, candidate: Candidate, head: Release) -> CandidateSampler:
        return PinnedSampler(self.chat, candidate.runtime_load_id, head.runtime_load_id)

    async def _check_chain(self) -> None:
        """Adapters fit one base model and one kind of trainer only. Raises ConfigError before anything is started."""
        for state in await self.storage.scenarios():
            base = (await self.storage.releases(state.scenario, limit=10_000_000))[-1]
            if base.content_id != self._base:
                raise ConfigError(
                    f"inference.model-path: scenario {state.scenario!r} in {self.data} was begun on another base "
                    "model; serve that one, or choose another reef.data-dir"
                )
            training = self.config.training
            if isinstance(training, NoTraining) or state.head.content_id == self._base:
                continue
            kind = self._publication.load_of(state.head.runtime_load_id, state.head.content_id).kind
            if kind != training.mode:
                raise ConfigError(
                    f"training.mode is {training.mode}, but the head of scenario {state.scenario!r} is {kind}: "
                    f"start with training.mode {kind}, or choose another reef.data-dir"
                )

    async def _recover(self) -> None:
        states = await self.storage.scenarios()
        marker = await self._runtime.marker()
        commit = await self.storage.commit_by_job(marker.job_id) if marker else None
        committed = commit is not None and commit.release is not None
        recovered = await self._runtime.recover([state.head for state in states], committed)
        for state in states:
            self._scenarios[state.scenario] = Scenario(state, self._services)
        marker = await self._runtime.marker()
        if marker and commit is None and marker.state is MarkerState.REJECTED and marker.candidate:
            scenario = self._scenarios[marker.scenario]
            await scenario.write_off_recovered(marker.candidate, marker.error or "rejected before a restart")
        for scenario in self._scenarios.values():
            mine = recovered if recovered is not None and recovered.scenario == scenario.name else None
            await scenario.start(mine)
        await self.scenario(self.config.reef.default_scenario, create=True)

    async def _collect_garbage(self) -> None:
        """Keep every release's content, the newest optimizer states, and what rollback or promotion may still name."""
        keep: set[str] = set()
        marker = await self._runtime.marker()
        if marker is not None and marker.candidate is not None:
            keep |= {marker.candidate.content_id, marker.candidate.state_id or ""}
        for scenario in self._scenarios:
            releases = await self.storage.releases(scenario, limit=100_000)
            keep |= {release.content_id for release in releases}
            keep |= {release.state_id or "" for release in releases[:KEPT_STATES]}
            for commit in await self.storage.commits(scenario, limit=KEPT_REJECTED):
                found = commit.metrics.get("candidate", {})
                keep |= {found.get("content_id", ""), found.get("state_id", "")}
        freed = await asyncio.to_thread(self._contents.retain, keep)
        log.debug("freed %d bytes of contents", freed)

    async def close(self) -> None:
        """Close in reverse order of start; nothing that fails keeps the rest open."""
        await self._opened.aclose()

    async def _close_scenarios(self) -> None:
        for scenario in self._scenarios.values():
            await scenario.close()

    # ------------------------------------------------------------------ what routes use

    def models(self) -> list[str]:
        config = self.config.inference
        return [config.served_model_name or Path(config.model_path).name]

    def scenarios(self) -> list[Scenario]:
        return list(self._scenarios.values())

    async def scenario(self, name: str, *, create: bool) -> Scenario:
        """Return the scenario; with `create`, make it on first use. Raises NotFound."""
        if found := self._scenarios.get(name):
            return found
        if not create:
            raise NotFound(f"there is no scenario {name!r}")
        async with self._creating:
            if found := self._scenarios.get(name):
                return found
            state = await self.storage.create_scenario(chain.base_release(name, self._base, time.time()))
            self._publication.remember(state.head)
            scenario = Scenario(state, self._services)
            await scenario.start()
            self._scenarios[name] = scenario
            return scenario

    async def health(self) -> list[str]:
        """Why it cannot serve or store now; empty when it can."""
        checked_at, reason = self._checked
        if time.monotonic() - checked_at > HEALTH_SECONDS:
            try:
                await self.storage.check()
                reason = ""
            except StorageError as error:
                reason = str(error)
            self._checked = (time.monotonic(), reason)
        return [*self._runtime.health(), *([reason] if reason else [])]

    async def status(self) -> dict[str, Any]:
        marker = await self._runtime.marker()
        return {
            "version": __version__,
            "model": self.models()[0],
            "uptime_seconds": round(time.time() - self.started_at, 1),
            "health": await self.health(),
            "training_health": self._runtime.training_health(),
            "engines": await self._runtime.engine_reports(),
            "last_pause_seconds": self._publication.pause_seconds,
            "job": None
            if marker is None
            else {"job_id": marker.job_id, "scenario": marker.scenario, "state": marker.state, "error": marker.error},
            "scenarios": [await scenario.status() for scenario in self._scenarios.values()],
        }


def build(config: ReefConfig) -> Deployment:
    """Return the deployment that `config` describes, not started."""
    return Deployment(config)
