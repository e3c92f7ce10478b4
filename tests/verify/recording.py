"""A data directory as a deployment leaves it: a real engine's answers, a real store, a real chain."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from reef.artifact import chain
from reef.artifact.base import Serving, base_content_id, write_serving
from reef.artifact.content import DirectoryContentStore
from reef.inference.local.engine import LocalEngine
from reef.records.opening import storage_at
from reef.runtime.interfaces import (
    Candidate,
    Commit,
    CommitKind,
    Ending,
    Evaluation,
    Generation,
    InferenceRecord,
    PauseMode,
    Release,
    Span,
    TokenChunk,
    WeightKind,
    WeightLoad,
)
from tests.inference.references import engine, request

SCENARIO = "reef"


class Recording:
    """Drives one engine by hand and stores what it says, as the service would."""

    def __init__(self, model: Path, data: Path, database: str = "", **options: Any) -> None:
        self.model, self.data = model, data
        self.database = database or f"sqlite:{data / 'reef.db'}"
        self.base_id = base_content_id(model, data / "base-model.json")
        self.engine: LocalEngine = engine(model, **options)
        self.contents = DirectoryContentStore(data / "artifacts")
        self.releases: list[Release] = [chain.base_release(SCENARIO, self.base_id, 0.0)]
        self.answers: dict[str, Generation] = {}
        write_serving(data, Serving(str(model), "float32"))
        self._store(lambda storage: storage.create_scenario(self.releases[0]))

    # ------------------------------------------------------------------ the engine

    def ask(self, name: str, prompt_ids: list[int], **sampling: Any) -> None:
        lane = SCENARIO
        self.engine.add(request(name, prompt_ids, lane=lane, **{"temperature": 1.0, "seed": 7, **sampling}))
        self.answers[name] = Generation(
            prompt_ids=prompt_ids, output_ids=[], logprobs=[], sampled_logprobs=[], spans=[], ending=Ending.ENGINE_CUT
        )

    def step(self, count: int = 1000) -> None:
        for _ in range(count):
            if not self.engine.has_work():
                return
            for chunk in self.engine.step():
                self._take(chunk)

    def _take(self, chunk: TokenChunk) -> None:
        answer = self.answers[chunk.request_id]
        for token_id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
            answer.output_ids.append(token_id)
            answer.logprobs.append(logprob)
            end, last = len(answer.output_ids), answer.spans[-1] if answer.spans else None
            if last is not None and last.runtime_load_id == chunk.runtime_load_id:
                answer.spans[-1] = replace(last, end=end)
            else:
                answer.spans.append(Span(end - 1, end, chunk.runtime_load_id))
        answer.sampled_logprobs += chunk.sampled_logprobs
        answer.cached_tokens = chunk.cached_tokens
        answer.ending = chunk.ending or answer.ending

    def publish(
        self, weights: Path, kind: WeightKind, mode: PauseMode, *, served: Path | None = None, **metrics: Any
    ) -> Release:
        """A new release of these weights; `served` are others that the engine gets in their place (a fault)."""
        content_id = self.contents.put(weights)
        head = self.releases[-1]
        load_id = f"engine:{head.number + 1}"
        path = served or self.contents.path(content_id)
        self.engine.stage(WeightLoad(runtime_load_id=load_id, content_id=content_id, kind=kind, path=str(path)))
        self.engine.pause(mode)
        self.engine.activate(SCENARIO, load_id)
        candidate = Candidate(
            job_id=f"job-{head.number}",
            scenario=SCENARIO,
            content_id=content_id,
            state_id=None,
            kind=kind,
            runtime_load_id=load_id,
            probe_logprobs=[],
            incumbent_probe_logprobs=[],
            metrics={"pause_mode": str(mode), **metrics},
        )
        release = chain.next_release(head, candidate, Evaluation(), 1.0)
        commit = Commit(
            commit_id=candidate.job_id,
            scenario=SCENARIO,
            kind=CommitKind.TRAINED,
            created_at=1.0,
            expected_head=head.release_id,
            release=release,
        )
        self._store(lambda storage: storage.commit(commit))
        self.engine.resume()
        self.releases.append(release)
        return release

    # ------------------------------------------------------------------ the store

    def record(self, *names: str) -> None:
        """Store these answers; without names all of them."""
        for number, name in enumerate(names or self.answers):
            self.append(name, [self.answers[name]], created_at=float(number))

    def append(self, receipt: str, generations: list[Generation], created_at: float = 0.0) -> None:
        record = InferenceRecord(
            record_id=receipt,
            scenario=SCENARIO,
            created_at=created_at,
            route="/v1/chat/completions",
            request=b"{}",
            response=b"{}",
            status=200,
            release_id=self.releases[-1].release_id,
            generations=generations,
        )
        self._store(lambda storage: storage.append(record))

    def _store(self, work: Any) -> None:
        async def run() -> None:
            storage = storage_at(self.database)
            await storage.open()
            try:
                await work(storage)
            finally:
                await storage.close()

        asyncio.run(run())
