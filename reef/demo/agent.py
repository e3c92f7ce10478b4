"""The demo's agent: answers through the official `openai` client, grades itself, reports, and waits for the step.

It knows nothing of models or training: chat completions, `POST /reef/report`, and reading the chain is all it does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import httpx
import openai

from reef.demo.task import MAX_TOKENS, Example, score
from reef.errors import TrainingError, Unavailable

T = TypeVar("T")

RECEIPT_HEADER = "x-reef-agent-record-id"
SCENARIO_HEADER = "x-reef-scenario"
STEP_TIMEOUT = 300.0
"""Seconds from the last report to the step's commit."""
POLL = 0.1
LEARNED = ("trained", "rejected", "no_signal")
"""Kinds of commits that end a step."""


@dataclass(slots=True, frozen=True)
class Graded:
    """One answer, its receipt and its score."""

    example: Example
    answer: str
    receipt: str
    score: float
    tokens: int


@dataclass(slots=True, frozen=True)
class Step:
    """One training step as the agent saw it."""

    number: int
    sample: Graded  # one of the sampled answers
    mean_score: float  # of the sampled answers, before the step
    tokens: int  # sampled in this step
    answer_seconds: float
    learn_seconds: float  # from the last report to the commit
    outcome: str  # kind of the commit
    reason: str  # why a candidate was rejected, else ""
    release: int  # number of the head afterwards
    metrics: dict[str, Any]  # of the commit

    @property
    def gate(self) -> float | None:
        """Mean score of the candidate at the evaluation gate; None if there was no candidate."""
        found: float | None = self.metrics.get("evaluation", {}).get("candidate_mean")
        return found

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.answer_seconds


def mean_score(graded: Sequence[Graded]) -> float:
    return sum(item.score for item in graded) / len(graded)


class Agent:
    """An async context manager; `concurrency` requests are under way at a time."""

    def __init__(self, url: str, model: str, scenario: str, seed: int, concurrency: int = 64) -> None:
        headers = {SCENARIO_HEADER: scenario}
        self._model, self._scenario, self._seed = model, scenario, seed
        self._gate = asyncio.Semaphore(concurrency)
        # Nothing is retried: an error is shown as it is.
        self._openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", default_headers=headers, max_retries=0, timeout=STEP_TIMEOUT
        )
        self._reef = httpx.AsyncClient(base_url=url, headers=headers, timeout=STEP_TIMEOUT)

    async def __aenter__(self) -> Agent:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._openai.close()
        await self._reef.aclose()

    async def ask(self, example: Example, temperature: float, seed: int | None = None) -> Graded:
        """One chat completion, graded. Raises Unavailable."""
        async with self._gate:
            try:
                raw = await self._openai.chat.completions.with_raw_response.create(
                    model=self._model,
                    messages=example.chat,
                    max_tokens=MAX_TOKENS,
                    temperature=temperature,
                    seed=seed,
                )
            except openai.OpenAIError as error:
                raise Unavailable(f"the model did not answer: {error!r}") from error
        completion = raw.parse()
        answer = completion.choices[0].message.content or ""
        return Graded(
            example=example,
            answer=answer,
            receipt=raw.headers[RECEIPT_HEADER],
            score=score(answer, example.expected),
            tokens=completion.usage.completion_tokens,
        )

    async def evaluate(self, examples: Sequence[Example]) -> list[Graded]:
        return await _all(self.ask(example, temperature=0.0) for example in examples)

    async def step(
        self, number: int, batch: Sequence[Example], rollouts: int, note: Callable[[str], None] = lambda doing: None
    ) -> Step:
        """Answer each example `rollouts` times, report every score, and wait until Reef learned from them.

        `note` is told what is under way.
        Raises TrainingError when Reef could not train, Unavailable when it takes longer than STEP_TIMEOUT.
        """
        before = await self._learned()
        note(f"asking the model for {len(batch) * rollouts} answers")
        began = time.perf_counter()
        places = [(index, rollout) for index in range(len(batch)) for rollout in range(rollouts)]
        graded = await _all(self.ask(batch[index], 1.0, self._sampling_seed(number, index, n)) for index, n in places)
        answered = time.perf_counter()
        note("reporting the scores; Reef trains, evaluates and publishes")
        await _all(
            self._report(item, f"step-{number}-prompt-{index}", rollouts)
            for item, (index, _) in zip(graded, places, strict=True)
        )
        commit = await self._next_commit(before)
        return Step(
            number=number,
            sample=graded[0],
            mean_score=mean_score(graded),
            tokens=sum(item.tokens for item in graded),
            answer_seconds=answered - began,
            learn_seconds=time.perf_counter() - answered,
            outcome=commit["kind"],
            reason=commit["metrics"].get("reason", ""),
            release=(await self._get(""))["head"]["number"],
            metrics=commit["metrics"],
        )

    def _sampling_seed(self, step: int, prompt: int, rollout: int) -> int:
        return self._seed * 1_000_000 + step * 10_000 + prompt * 100 + rollout

    async def _report(self, item: Graded, group: str, group_size: int) -> None:
        await self._post(
            "/reef/report",
            {
                "score": item.score,
                "references": [item.receipt],
                "metadata": {"group": group, "group_size": group_size},
            },
        )

    async def _next_commit(self, before: int) -> dict[str, Any]:
        """The first commit that ended a training step after step `before`."""
        deadline = time.monotonic() + STEP_TIMEOUT
        while time.monotonic() < deadline:
            commits = (await self._get("/commits", limit=20))["commits"]
            found = [commit for commit in commits if commit["step"] > before and commit["kind"] in LEARNED]
            if found:
                commit: dict[str, Any] = found[-1]
                # A candidate that evaluation rejected is named; without one there was none.
                if commit["kind"] == "rejected" and "candidate" not in commit["metrics"]:
                    raise TrainingError(f"the step failed: {commit['metrics'].get('reason')}")
                return commit
            await asyncio.sleep(POLL)
        status = await self._get("")
        raise Unavailable(
            f"no step was committed within {STEP_TIMEOUT:.0f} s; error {status['error']!r}, waiting {status['waiting']}"
        )

    async def _learned(self) -> int:
        """Number of the scenario's newest commit; 0 before the first."""
        commits = (await self._get("/commits", limit=1))["commits"]
        return int(commits[0]["step"]) if commits else 0

    async def releases(self) -> list[dict[str, Any]]:
        """The chain, oldest first."""
        return list(reversed((await self._get("/releases", limit=1000))["releases"]))

    async def feedback_count(self) -> int:
        return int((await self._get(""))["counts"]["report"])

    async def rollback(self, release_id: str) -> dict[str, Any]:
        return await self._post(f"/reef/scenarios/{self._scenario}/rollback", {"release_id": release_id})

    async def _get(self, rest: str, **query: int) -> dict[str, Any]:
        return await self._call("GET", f"/reef/scenarios/{self._scenario}{rest}", params=query)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._call("POST", path, json=body)

    async def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        """The JSON answer. Raises Unavailable, with the server's own words where it had any."""
        try:
            response = await self._reef.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise Unavailable(f"{method} {path} was not answered: {error!r}") from error
        if response.is_error:
            raise Unavailable(f"{method} {path} answered {response.status_code}: {response.text}")
        answer: dict[str, Any] = response.json()
        return answer


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]
