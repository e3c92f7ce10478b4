"""A deployment in front of an external provider: scenarios, records and reports, and nothing that could be trained."""

from __future__ import annotations

from typing import Any, NoReturn
from urllib.parse import urlsplit

from reef.artifact.content import DirectoryContentStore
from reef.errors import ConfigError, Conflict
from reef.inference.headers import load_header_provider
from reef.inference.provider.client import ProviderHandler
from reef.inference.provider.config import ProviderConfig
from reef.records.opening import artifacts_directory
from reef.runtime.interfaces import (
    Candidate,
    InferenceRuntime,
    Marker,
    Release,
    Storage,
    TrainingRuntime,
    TrainJob,
)
from reef.scenario.candidates import Complete
from reef.service.config import ReefConfig
from reef.service.deployment import Deployment

EXTERNAL = "external"
"""The content id of every base release here: bytes that are somebody else's."""


class ProviderRuntime(InferenceRuntime):
    """The provider in the place of engines."""

    def __init__(self, handler: ProviderHandler) -> None:
        self._handler = handler

    @property
    def handler(self) -> ProviderHandler:
        return self._handler

    def health(self) -> str | None:
        return None  # whether it answers is known from each request only

    async def close(self) -> None:
        await self._handler.close()


class NothingTrains(TrainingRuntime):
    """No weights, no candidates, no marker."""

    def __init__(self, handler: ProviderHandler) -> None:
        self._handler = handler

    async def start(self) -> None:
        await self._handler.connect()

    async def close(self) -> None: ...

    async def train(self, job: TrainJob, runtime_load_id: str) -> Candidate:
        _refuse()

    async def adopt(self, candidate: Candidate) -> Candidate:
        _refuse()

    async def publish(self, candidate: Candidate) -> None:
        _refuse()

    async def acknowledge(self, job_id: str, release: Release) -> None:
        _refuse()

    async def reject(self, job_id: str, reason: str) -> None: ...

    async def remember(self, release: Release) -> None: ...

    async def recover(self, storage: Storage) -> Candidate | None:
        return None

    async def marker(self) -> Marker | None:
        return None

    def health(self) -> str | None:
        return None


def _refuse() -> NoReturn:
    raise Conflict("the weights are an external provider's: nothing can be trained or published")


async def _complete(*arguments: Any, **named: Any) -> str:
    _refuse()


class ProviderDeployment(Deployment):
    """A deployment with section `inference` of backend `provider`."""

    def __init__(self, config: ReefConfig, provider: ProviderConfig) -> None:
        super().__init__(config)
        self._provider_config = provider
        self._handler = self.provider = ProviderHandler(provider)
        self._handler.header_provider = load_header_provider(provider.header_providers)

    async def _assemble(self) -> tuple[Complete, list[int]]:
        self._base = EXTERNAL
        self._contents = DirectoryContentStore(artifacts_directory(self.config.storage, self.data))
        self._training, self._inference = NothingTrains(self._handler), ProviderRuntime(self._handler)
        return _complete, []

    async def _check_chain(self) -> None:
        for state in await self.storage.scenarios():
            if state.head.content_id != EXTERNAL:
                raise ConfigError(
                    f"inference.upstream-url: scenario {state.scenario!r} in {self.data} was begun on a model of its "
                    "own; serve that one, or choose another reef.data-dir"
                )

    async def _note_serving(self) -> None: ...

    def models(self) -> list[str]:
        return [self._provider_config.upstream_model or str(urlsplit(self._provider_config.upstream_url).hostname)]


def build(config: ReefConfig) -> Deployment:
    """Return the deployment that `config` describes, not started. Raises ConfigError."""
    if isinstance(config.inference, ProviderConfig):
        return ProviderDeployment(config, config.inference)
    return Deployment(config)
