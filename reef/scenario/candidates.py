"""What a scenario drives, on top of the training runtime and the chat path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from reef.runtime.interfaces import (
    Candidate,
    CandidateBackend,
    CandidateSampler,
    Release,
    SamplingParams,
    TrainingRuntime,
    TrainJob,
)

Complete = Callable[..., Awaitable[str]]
"""(messages, sampling, runtime_load_id=...) -> the answer's text."""


class PinnedSampler(CandidateSampler):
    """Asks the engines under pinned weights: the staged candidate, or the incumbent that serves."""

    def __init__(self, complete: Complete, candidate: str, incumbent: str) -> None:
        self._complete = complete
        self._loads = {True: candidate, False: incumbent}

    async def chat(self, messages: list[dict[str, Any]], sampling: SamplingParams, *, candidate: bool) -> str:
        return await self._complete(messages, sampling, runtime_load_id=self._loads[candidate])


class RuntimeCandidateBackend(CandidateBackend):
    """Candidates that a training runtime makes and publishes, and that are sampled where they are staged."""

    def __init__(self, training: TrainingRuntime, complete: Complete) -> None:
        self._training = training
        self._complete = complete

    async def train(self, job: TrainJob, runtime_load_id: str) -> Candidate:
        return await self._training.train(job, runtime_load_id)

    async def adopt(self, candidate: Candidate) -> Candidate:
        return await self._training.adopt(candidate)

    def sampler(self, candidate: Candidate, head: Release) -> CandidateSampler:
        return PinnedSampler(self._complete, candidate.runtime_load_id, head.runtime_load_id)

    async def publish(self, candidate: Candidate) -> None:
        await self._training.publish(candidate)

    async def commit(self, candidate: Candidate, release: Release) -> None:
        await self._training.acknowledge(candidate.job_id, release)
        await self._training.commit_candidate(candidate, release)

    async def reject(self, job_id: str, reason: str) -> None:
        await self._training.reject(job_id, reason)
