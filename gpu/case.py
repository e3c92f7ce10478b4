"""One case: a colocated deployment of real processes learns while clients stream, and everything it says is checked."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from crash.model import VOCABULARY, make_model
from reef.artifact import chain
from reef.artifact.base import base_content_id
from reef.artifact.content import DirectoryContentStore
from reef.inference.local.backend import LocalBackend
from reef.inference.local.client import LocalHandler
from reef.inference.local.config import LocalConfig
from reef.runtime.colocation import Colocation
from reef.runtime.executor import make_executor
from reef.runtime.interfaces import (
    BASE_LOAD_ID,
    Candidate,
    Evaluation,
    Executor,
    GenerateRequest,
    MemoryRegion,
    Objective,
    PauseMode,
    Release,
    ReleaseKind,
    SamplingParams,
    StepSignal,
    TokenChunk,
    TrainJob,
    TrainSample,
    WeightKind,
)
from reef.runtime.publication import Publication, probe_ids
from reef.runtime.recovery import MarkerFile
from reef.runtime.scheduler import TrainingCoordinator
from reef.train.torch_backend.backend import TorchBackend
from reef.train.torch_backend.config import PROCESS_ENVIRONMENT, TorchConfig, TorchOptions

log = logging.getLogger("gpu")

SCENARIO = "gpu"
# 27 million parameters: enough to see in a GPU's memory. A CPU gets a twelfth.
SIZES = {
    "cuda": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "cpu": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3},
}
CLIENTS = 8
STEPS = 2
# Of the engine's own answers, scored again without its cache: most, and on average (nat). In bfloat16 two kernels round
# differently at every layer, and an improbable token shows it.
TOLERANCE = {"float32": (1e-3, 1e-4), "bfloat16": (math.inf, 0.1)}
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Case:
    name: str
    mode: WeightKind
    dtype: str
    resident: bool = False  # training.options.keep-lora-base-resident


CASES = (
    Case("lora-float32", WeightKind.LORA, "float32"),
    Case("full-float32", WeightKind.FULL, "float32"),
    Case("lora-bfloat16-resident", WeightKind.LORA, "bfloat16", resident=True),
    Case("full-bfloat16", WeightKind.FULL, "bfloat16"),
)


@dataclass(slots=True)
class Outcome:
    """What was measured. Bytes are of one process on the device (on a CPU: resident), `device_free` of the device."""

    name: str
    problems: list[str] = field(default_factory=list)
    start_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)  # for which requests waited
    train_seconds: list[float] = field(default_factory=list)  # of them, the optimizer step itself
    publication_pause_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    largest_difference: float = 0.0  # nat, between an answer and its score
    mean_difference: float = 0.0
    probe_difference: float = 0.0  # nat, between trainer and engine under the last candidate
    memory: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    request: GenerateRequest
    chunks: list[TokenChunk] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [value for chunk in self.chunks for value in chunk.logprobs]

    @property
    def loads(self) -> list[str]:
        """In the order in which they produced tokens, each run once."""
        found: list[str] = []
        for chunk in self.chunks:
            if chunk.token_ids and chunk.runtime_load_id not in found[-1:]:
                found.append(chunk.runtime_load_id)
        return found


async def run(case: Case, device: str, directory: Path) -> Outcome:
    """Never raises for what the deployment does wrong: that is in the outcome."""
    outcome = Outcome(case.name)
    async with AsyncExitStack() as opened:
        try:
            deployment = Deployment(case, device, directory, outcome)
            opened.push_async_callback(deployment.close)
            await deployment.start()
            await deployment.learn()
            await deployment.roll_back()
            await deployment.replace_engines()
        except Exception as error:  # the other cases may still tell something
            log.exception("%s failed", case.name)
            outcome.problems.append(f"{type(error).__name__}: {error}")
    return outcome


class Deployment:
    """Engine and trainer in processes of their own, with a coordinator in this one."""

    def __init__(self, case: Case, device: str, directory: Path, outcome: Outcome) -> None:
        self._case, self._outcome, self._directory = case, outcome, directory
        model = make_model(directory / "model", case.dtype, **SIZES[device])
        base = base_content_id(model, directory / "base.json")
        inference = LocalConfig(
            model_path=str(model),
            device=device,
            dtype=case.dtype,
            threads=1,
            kv_cache_tokens=16384,
            pause_mode=PauseMode.RETRACT,
        )
        training = TorchConfig(
            mode=case.mode.value,
            device=device,
            dtype=case.dtype,
            threads=1,
            learning_rate=1e-2 if case.mode is WeightKind.LORA else 1e-3,
            colocate=True,
            options=TorchOptions(keep_lora_base_resident=case.resident),
        )
        self.engines = LocalBackend(inference, partial(_processes, "engine"), base_content_id=base)
        arguments = [{"model_path": str(model), "config": training}]
        worker = "reef.train.torch_backend.worker:TorchWorker"
        self.trainer = TorchBackend(training, partial(_processes, "trainer", worker, arguments))
        self.contents = DirectoryContentStore(directory / "artifacts")
        self._probe = probe_ids(VOCABULARY)
        publication = self.publication = Publication(self.engines, self.contents, PauseMode.RETRACT, base, self._probe)
        self.colocation = Colocation(publication, self.trainer, [MemoryRegion.WEIGHTS] if case.resident else [])
        marker = MarkerFile(directory / "marker.json")
        self.coordinator = TrainingCoordinator(self.trainer, publication, self.contents, marker, self.colocation)
        self.handler = LocalHandler(self.engines.endpoints)
        self.base = self.head = chain.base_release(SCENARIO, base, time.time())
        self._loads = 0
        self._asked = 0

    async def start(self) -> None:
        began = time.monotonic()
        await asyncio.to_thread(self.engines.start)
        await asyncio.to_thread(self.colocation.start_trainer, resume=False)
        await asyncio.to_thread(self.coordinator.recover, [self.head], False)
        await self.handler.connect()
        self._outcome.start_seconds = round(time.monotonic() - began, 2)
        self._note_memory("start")

    async def close(self) -> None:
        await self.handler.close()
        await asyncio.to_thread(self.trainer.close)
        await asyncio.to_thread(self.engines.close)

    # ------------------------------------------------------------------ what is tried

    async def learn(self) -> None:
        """Steps from the answers of the step before, while clients stream across each."""
        answers = await self._stream(CLIENTS, 48)
        for _ in range(STEPS):
            crossing = self._questions(CLIENTS, 600)
            streaming = asyncio.create_task(self._read_all(crossing))
            while not all(answer.chunks for answer in crossing):
                await asyncio.sleep(0.01)
            before = self.head
            candidate = await self._step(answers)
            release = chain.next_release(self.head, candidate, Evaluation(), time.time())
            await self._publish(candidate, release)
            await streaming
            loads = {before.runtime_load_id, release.runtime_load_id}
            assert all(set(answer.loads) <= loads for answer in crossing), "a token of neither release"
            assert any(len(answer.loads) == 2 for answer in crossing), "no stream crossed the step"
            answers = await self._stream(CLIENTS, 48)
            assert all(answer.loads == [release.runtime_load_id] for answer in answers), "the release does not serve"
            await self._score(answers)
        self._outcome.probe_difference = await self._probe_difference(candidate)

    async def roll_back(self) -> None:
        """Publish the base again: it must be the base to the bit."""
        candidate = Candidate(
            job_id="rollback",
            scenario=SCENARIO,
            content_id=self.base.content_id,
            state_id=None,
            kind=WeightKind.FULL,
            runtime_load_id=self._next_load(),
            probe_logprobs=[],
            incumbent_probe_logprobs=[],
            origin=ReleaseKind.ROLLBACK,
            source_release_id=self.base.release_id,
        )
        await asyncio.to_thread(self.coordinator.adopt, candidate)
        await self._publish(candidate, chain.next_release(self.head, candidate, Evaluation(), time.time()))
        scores = [await self._call(self.engines.score, load, self._probe) for load in (self._now, BASE_LOAD_ID)]
        assert scores[0] == scores[1], "the base does not serve after a rollback to it"

    async def replace_engines(self) -> None:
        """Fresh engines serve the head."""
        await asyncio.to_thread(self.coordinator.repair_engines)
        await self.handler.connect()
        answers = await self._stream(2, 16)
        assert all(answer.loads == [self._now] for answer in answers), "fresh engines do not serve the head"
        await self._score(answers)

    # ------------------------------------------------------------------ how

    @property
    def _now(self) -> str:
        return self.head.runtime_load_id

    def _next_load(self) -> str:
        self._loads += 1
        return f"engine:{self._loads}"

    async def _step(self, answers: Sequence[Answer]) -> Candidate:
        """Train on `answers`: bytes below 128 are good."""
        began = time.monotonic()
        is_base = self.head.content_id == self.base.content_id
        job = TrainJob(
            job_id=f"job-{self._loads + 1}",
            scenario=SCENARIO,
            step=self._loads + 1,
            signal=StepSignal(objective=Objective("policy_gradient"), samples=_samples(answers)),
            incumbent_path=None if is_base else str(self.contents.path(self.head.content_id)),
            state_path=str(self.contents.path(self.head.state_id)) if self.head.state_id else None,
            output_path=str(self._directory / "candidate"),
            probe_ids=self._probe,
        )
        candidate = await self._call(self.coordinator.train, job, self._next_load())
        assert candidate.probe_logprobs != candidate.incumbent_probe_logprobs, "the step moved nothing"
        outcome = self._outcome
        outcome.step_seconds.append(round(self.colocation.step_seconds or time.monotonic() - began, 3))
        outcome.train_seconds.append(round(candidate.metrics["seconds"], 3))
        self._note_memory(job.job_id)
        return candidate

    async def _publish(self, candidate: Candidate, release: Release) -> None:
        await self._call(self.coordinator.publish, candidate)
        self.head = release
        await self._call(self.coordinator.acknowledge, candidate.job_id, release)
        self._outcome.publication_pause_ms.append(round(sum(self.publication.clock.newest.values()) * 1e3, 2))

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(function, *args)

    async def _stream(self, count: int, tokens: int) -> list[Answer]:
        answers = self._questions(count, tokens)
        await self._read_all(answers)
        return answers

    def _questions(self, count: int, tokens: int) -> list[Answer]:
        """Prompts of many lengths; every second answer is sampled, and each two share a prefix."""
        questions = []
        for index in range(count):
            self._asked += 1
            prompt = [(7 * position + index // 2) % VOCABULARY for position in range(3 + 37 * index)]
            params = SamplingParams(max_tokens=tokens, temperature=float(index % 2), ignore_eos=True, seed=self._asked)
            request = GenerateRequest(request_id=f"r{self._asked}", prompt_ids=prompt, sampling=params, lane=SCENARIO)
            questions.append(Answer(request))
        return questions

    async def _read_all(self, answers: Sequence[Answer]) -> None:
        await asyncio.gather(*(self._read(answer) for answer in answers))
        self._outcome.tokens += sum(len(answer.output_ids) for answer in answers)
        wanted = [answer.request.sampling.max_tokens for answer in answers]
        assert [len(answer.output_ids) for answer in answers] == wanted, "an answer was cut short"

    async def _read(self, answer: Answer) -> None:
        async for chunk in self.handler.generate(answer.request):
            answer.chunks.append(chunk)

    async def _score(self, answers: Sequence[Answer]) -> None:
        """Each answer again, in one pass without the KV cache, under the load that it names."""
        differences = []
        for answer in answers:
            prompt = answer.request.prompt_ids
            scores = (await self._call(self.engines.score, answer.loads[0], prompt + answer.output_ids))[0]
            again = scores[len(prompt) - 1 :]
            differences += [abs(a - b) for a, b in zip(again, answer.logprobs, strict=True)]
        outcome, (most, mean) = self._outcome, TOLERANCE[self._case.dtype]
        outcome.largest_difference = max(outcome.largest_difference, *differences)
        outcome.mean_difference = max(outcome.mean_difference, sum(differences) / len(differences))
        assert outcome.largest_difference <= most and outcome.mean_difference <= mean, (
            "answers do not score as recorded"
        )

    async def _probe_difference(self, candidate: Candidate) -> float:
        served = (await self._call(self.engines.score, candidate.runtime_load_id, self._probe))[0]
        return max(abs(a - b) for a, b in zip(served, candidate.probe_logprobs, strict=True))

    def _note_memory(self, when: str) -> None:
        for what, reports in self.colocation.reports.items():
            for report in reports:
                self._outcome.memory.append(
                    {
                        "when": when,
                        "what": what,
                        "owner": report.owner,
                        "released": list(report.released),
                        "mb_before": round(report.bytes_before / 1e6, 1),
                        "mb_after": round(report.bytes_after / 1e6, 1),
                        "device_free_mb": round(report.device_free / 1e6, 1),
                    }
                )
                shrinks = report.bytes_after < report.bytes_before
                assert shrinks or "release" not in what, f"{when}: {report.owner} released nothing"


def _samples(answers: Sequence[Answer]) -> list[TrainSample]:
    return [
        TrainSample(
            record_id=answer.request.request_id,
            prompt_ids=answer.request.prompt_ids,
            output_ids=answer.output_ids,
            logprobs=answer.logprobs,
            advantages=[1.0 if token < 128 else -1.0 for token in answer.output_ids],
        )
        for answer in answers
    ]


def _processes(name: str, worker: str, kwargs_per_rank: Sequence[Mapping[str, Any]]) -> Executor:
    return make_executor("mp", worker, kwargs_per_rank, name=name, env_per_rank=[PROCESS_ENVIRONMENT])
