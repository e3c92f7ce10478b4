"""One deployment as the service sees it: storage, the pair of runtimes, scenarios; and its way up and down."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reef import __version__
from reef.artifact import chain
from reef.artifact.base import Serving, write_serving
from reef.errors import ConfigError, NotFound, StorageError
from reef.inference.chat.service import ChatService
from reef.inference.provider.client import ProviderHandler
from reef.recipe.lookup import build_evaluator, build_recipe
from reef.records.lock import DirectoryLock
from reef.records.opening import artifacts_directory, location, open_storage
from reef.records.retention import keep_purging
from reef.runtime.interfaces import (
    EngineReport,
    InferenceHandler,
    MarkerState,
    PrefixUse,
    Record,
    ScenarioState,
    Storage,
)
from reef.runtime.publication import weight_kind
from reef.runtime.recovery import MarkerFile
from reef.scenario.candidates import Complete, RuntimeCandidateBackend
from reef.scenario.scenario import Scenario
from reef.scenario.steps import Services
from reef.service.config import NoTraining, ReefConfig
from reef.service.membership import FOLLOWING, Membership, serve_release
from reef.service.plan import lay_foundation, managed, pause_mode
from reef.service.redaction import Redaction
from reef.service.runtime import build_runtimes

log = logging.getLogger("reef.service")

KEPT_REJECTED = 20  # newest commits whose rejected candidates stay on disk
KEPT_STATES = 3  # optimizer states of the newest releases of a scenario
LEAST_SPACE = 1 << 20  # bytes; with less than this free, the next checkpoint or database page may not fit
HEALTH_SECONDS = 1.0  # a durable write proves the store at most this often


class Deployment:
    """What the HTTP layer serves. Built stopped; `start` brings it to the last committed releases."""

    provider: ProviderHandler | None = None  # requests go there, and there is no chat path

    def __init__(self, config: ReefConfig) -> None:
        self.config = config
        self.data = Path(config.reef.data_dir)
        self.redaction = Redaction.load(config.reef.redact)
        self.started_at = time.time()
        self._lock = DirectoryLock(self.data)
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
            await self.storage.open()
            opened.push_async_callback(self.storage.close)
            opened.push_async_callback(self._membership.close)
            await self._membership.begin()
            await self._check_chain()
            opened.push_async_callback(self._training.close)
            opened.push_async_callback(self._inference.close)
            await self._training.start()
            opened.push_async_callback(self._close_scenarios)
            await self._recover()
            self._membership.watch()
            purging = asyncio.create_task(
                keep_purging(self.storage, self.config.storage, time.time, lambda: self._membership.trains)
            )
            opened.callback(purging.cancel)
            await self._note_serving()
            self._opened = opened.pop_all()

    async def _build(self) -> None:
        config, data = self.config, self.data
        storage = open_storage(config.storage, data)
        storage.prepare = self._redacted
        self.storage: Storage = storage
        self._membership = Membership(
            self.storage, data, config.storage.lease_seconds, follow=self._follow, take_over=self._take_over
        )
        complete, probe_ids = await self._assemble()
        self._services = Services(
            storage=self.storage,
            contents=self._contents,
            candidates=RuntimeCandidateBackend(self._training, complete),
            recipe=build_recipe(config.recipe),
            evaluator=build_evaluator(config.evaluation, self._training),
            turn=asyncio.Lock(),
            scratch=data / "candidates",
            base_content_id=self._base,
            probe_ids=probe_ids,
            released=self._collect_garbage,
            elsewhere=self._membership.elsewhere,
            may_train=lambda scenario: config.reef.permissions_of(scenario).train,
            pause_mode=pause_mode(config),
        )

    def _redacted(self, record: Record) -> Record:
        return self.redaction.record(record, None if self.provider else self.chat.tokenizer.text_of)

    async def _assemble(self) -> tuple[Complete, list[int]]:
        """Make both runtimes and what is asked through them; return how a candidate is asked, and what probes it."""
        foundation = await asyncio.to_thread(lay_foundation, self.config)
        self._base, self._contents = foundation.base_content_id, foundation.contents
        self._training, self._inference = build_runtimes(self.config, foundation)
        self.handler: InferenceHandler = self._inference.handler
        self.chat = ChatService(foundation.tokenizer, self.handler)
        return self.chat.complete, foundation.probe_ids

    async def _note_serving(self) -> None:
        """Leave in the data directory what whoever reads it alone needs."""
        dtype = next((report.dtype for report in await self._inference.reports()), "")
        model, storage = str(Path(managed(self.config).model_path).resolve()), self.config.storage
        artifacts = str(Path(storage.artifacts).resolve()) if storage.artifacts else ""
        write_serving(self.data, Serving(model, dtype, location(storage), artifacts))

    async def _check_chain(self) -> None:
        """Adapters fit one base model, one kind of trainer and so many slots. Raises ConfigError before any start."""
        states = await self.storage.scenarios()
        heads = {state.head.content_id for state in states} - {self._base}
        if len(heads) > (slots := managed(self.config).max_loads):
            raise ConfigError(
                f"inference.max-loads is {slots}, but {len(heads)} scenarios in {self.data} have weights of their own: "
                f"set it to {len(heads) + 1} or more (one slot is for the next candidate)"
            )
        for state in states:
            base = (await self.storage.releases(state.scenario, limit=10_000_000))[-1]
            if base.content_id != self._base:
                raise ConfigError(
                    f"inference.model-path: scenario {state.scenario!r} in {self.data} was begun on another base "
                    "model; serve that one, or choose another reef.data-dir"
                )
            training, content = self.config.training, state.head.content_id
            if content != self._base and not self._contents.exists(content):
                raise ConfigError(
                    f"storage.artifacts: the head of scenario {state.scenario!r} is content {content}, which is not in "
                    f"{artifacts_directory(self.config.storage, self.data)}: name the directory of the process that "
                    "made it, which every process on this database must share"
                )
            if isinstance(training, NoTraining) or content == self._base:
                continue
            kind = weight_kind(self._contents.path(content))
            if kind != training.mode:
                raise ConfigError(
                    f"training.mode is {training.mode}, but the head of scenario {state.scenario!r} is {kind}: "
                    f"start with training.mode {kind}, or choose another reef.data-dir"
                )

    async def _recover(self) -> None:
        recovered = await self._training.recover(self.storage)
        if recovered and (not self._membership.trains or recovered.job_id.startswith(FOLLOWING)):
            await self._training.reject(recovered.job_id, "another process trains, or has committed it")
            recovered = None
        for state in await self.storage.scenarios():
            self._scenarios[state.scenario] = Scenario(state, self._services)
        if self._membership.trains:
            await self._write_off_rejected()
        for scenario in self._scenarios.values():
            mine = recovered if recovered is not None and recovered.scenario == scenario.name else None
            await scenario.start(mine)
        await self.scenario(self.config.reef.default_scenario, create=True)

    async def _write_off_rejected(self) -> None:
        """A candidate was rejected just before the service died: its records are consumed now."""
        marker = await self._training.marker()
        if marker is None or marker.state is not MarkerState.REJECTED or marker.candidate is None:
            return
        scenario = self._scenarios.get(marker.scenario)
        if scenario is None or marker.job_id.startswith(FOLLOWING):
            return
        if await self.storage.commit_by_job(marker.job_id) is None:
            await scenario.write_off_recovered(marker.candidate, marker.error or "rejected before a restart")

    async def _collect_garbage(self) -> None:
        """Keep every release's content, the newest optimizer states, and what rollback or promotion may still name."""
        if not self._membership.trains:  # the candidate of whoever does is not known here
            return
        keep: set[str] = set()
        marker = await self._training.marker()
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
        config = managed(self.config)
        return [config.served_model_name or Path(config.model_path).name]

    async def engines(self) -> list[EngineReport]:
        return await self._inference.reports()

    @property
    def trains(self) -> bool:
        """Whether it is this process that trains, of those on one database."""
        return self._membership.trains

    def scenarios(self) -> list[Scenario]:
        return list(self._scenarios.values())

    async def scenario(self, name: str, *, create: bool) -> Scenario:
        """Return the scenario; with `create`, make it on first use. Raises NotFound."""
        if found := self._scenarios.get(name):
            return found
        async with self._creating:
            if found := self._scenarios.get(name):
                return found
            state = await self.storage.scenario(name)  # another process may have made it
            if state is None and not create:
                raise NotFound(f"there is no scenario {name!r}")
            if state is None:
                state = await self.storage.create_scenario(chain.base_release(name, self._base, time.time()))
            return await self._meet(state)

    async def _meet(self, state: ScenarioState) -> Scenario:
        base = state.head
        if base.number:
            base = (await self.storage.releases(state.scenario, limit=10_000_000))[-1]
        await self._training.remember(base)
        if state.head.number:
            async with self._services.turn:
                await serve_release(self._training, state.head)
        scenario = Scenario(state, self._services)
        await scenario.start()
        self._scenarios[state.scenario] = scenario
        return scenario

    async def _follow(self, state: ScenarioState) -> None:
        """Another process committed this: serve it, too."""
        scenario = await self.scenario(state.scenario, create=False)
        async with self._services.turn:
            if scenario.head.release_id != state.head.release_id:
                await serve_release(self._training, state.head)
            scenario.follow(state)

    async def _take_over(self, state: ScenarioState) -> None:
        """From now on this process trains: what it knew of the scenario's reports is not what the store says."""
        await self._follow(state)
        await self._scenarios[state.scenario].take_over(state)

    async def health(self) -> list[str]:
        """Why it cannot serve or store now; empty when it can."""
        checked_at, reason = self._checked
        if time.monotonic() - checked_at > HEALTH_SECONDS:
            try:
                await self.storage.check()
                reason = await asyncio.to_thread(_no_space, self.data)
            except StorageError as error:
                reason = str(error)
            self._checked = (time.monotonic(), reason)
        return [text for text in (self._inference.health(), reason, self._membership.trouble) if text]

    def admit(self) -> None:
        """Raises Unavailable, with the reason, while the engines cannot serve."""
        self._inference.admit()

    async def status(self) -> dict[str, Any]:
        marker = await self._training.marker()
        engines = await self.engines()
        phases = self._inference.pause_phases
        return {
            "version": __version__,
            "model": self.models()[0],
            "uptime_seconds": round(time.time() - self.started_at, 1),
            "health": await self.health(),
            "training_health": self._training.health(),
            "engines": engines,
            "trains": self._membership.elsewhere() or "this process",
            "residency": self._inference.residency,
            "last_pause_seconds": sum(phases.values()) if phases else None,
            "last_pause_phases": phases,
            "memory": self._inference.memory,
            "job": None
            if marker is None
            else {"job_id": marker.job_id, "scenario": marker.scenario, "state": marker.state, "error": marker.error},
            "scenarios": [
                {**await scenario.status(), "prefixes": _prefix_use(engines, scenario.name)}
                for scenario in self._scenarios.values()
            ],
        }


def _no_space(directory: Path) -> str:
    """Why nothing more fits there, or "". A database may reuse its log's space for a while; new files cannot."""
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks == 0 or free >= LEAST_SPACE:  # some file systems have no size
        return ""
    return f"no space left for {directory}: {free} bytes are free, less than {LEAST_SPACE}"


def _prefix_use(engines: Sequence[EngineReport], lane: str) -> dict[str, int]:
    """What prefix sharing did for the lane, over all engines."""
    uses = [asdict(engine.prefixes.get(lane, PrefixUse())) for engine in engines]
    return {name: sum(use[name] for use in uses) for name in asdict(PrefixUse())}
