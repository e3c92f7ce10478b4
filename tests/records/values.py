"""Records and releases to store."""

from __future__ import annotations

import json
import random

from reef.runtime.interfaces import (
    BASE_LOAD_ID,
    Commit,
    CommitKind,
    Consumption,
    Disposition,
    Ending,
    Generation,
    InferenceRecord,
    Release,
    ReleaseKind,
    ReportRecord,
    Span,
)

TEXT = "a calm short answer about weather time and what many people like to read in the early evening"


def exchange(record_id: str, scenario: str = "s", created_at: float = 100.0, prompt: str = "hello") -> InferenceRecord:
    """A small one; its log-probabilities are float32 already."""
    generation = Generation(
        prompt_ids=[1, 2, 70_000],
        output_ids=[5, 0, 2],
        logprobs=[-0.5, -1.25, 0.0],
        sampled_logprobs=[-0.25, -1.5, 0.0],
        spans=[Span(0, 2, "engine:1"), Span(2, 3, "engine:2")],
        ending=Ending.STOP,
        cached_tokens=2,
        temperature=0.7,
    )
    return InferenceRecord(
        record_id=record_id,
        scenario=scenario,
        created_at=created_at,
        route="/v1/chat/completions",
        request=json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode(),
        response=b'{"choices": []}\n',
        status=200,
        release_id="release-0",
        generations=[generation],
        tags={"user": "b", "agent": "a"},
    )


def typical(record_id: str, rng: random.Random, scenario: str = "demo") -> InferenceRecord:
    """An exchange as clients send them: bodies of about 300 and 500 bytes, 40 prompt and 30 output tokens."""
    question, answer = (" ".join(rng.choices(TEXT.split(), k=22)) for _ in range(2))
    request = {
        "model": "smollm2-135m-instruct",
        "messages": [
            {"role": "system", "content": "You answer with one short sentence, and you never ask back."},
            {"role": "user", "content": question},
        ],
        "max_tokens": 64,
        "temperature": 1.0,
    }
    response = {
        "id": f"chatcmpl-{rng.getrandbits(96):024x}",
        "object": "chat.completion",
        "created": 1_764_000_000 + rng.randrange(1_000_000),
        "model": "smollm2-135m-instruct",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 40, "completion_tokens": 30, "total_tokens": 70},
    }
    logprobs = [-rng.expovariate(1.0) for _ in range(30)]
    generation = Generation(
        prompt_ids=[rng.randrange(49_152) for _ in range(40)],
        output_ids=[rng.randrange(49_152) for _ in range(30)],
        logprobs=logprobs,
        sampled_logprobs=list(logprobs),
        spans=[Span(0, 30, "engine:7")],
        ending=Ending.STOP,
    )
    return InferenceRecord(
        record_id=record_id,
        scenario=scenario,
        created_at=1_764_000_000.0 + rng.random(),
        route="/v1/chat/completions",
        request=json.dumps(request).encode(),
        response=json.dumps(response).encode(),
        status=200,
        release_id="release-7-0123456789ab",
        generations=[generation],
    )


def report(
    record_id: str, references: list[str] | None = None, scenario: str = "s", score: float = 1.0
) -> ReportRecord:
    return ReportRecord(
        record_id=record_id, scenario=scenario, created_at=200.0, references=references or [], score=score
    )


def base(scenario: str = "s") -> Release:
    return Release(
        release_id="release-0",
        scenario=scenario,
        number=0,
        parent_id=None,
        kind=ReleaseKind.BASE,
        content_id="base",
        runtime_load_id=BASE_LOAD_ID,
        created_at=1.0,
    )


def following(head: Release, release_id: str) -> Release:
    return Release(
        release_id=release_id,
        scenario=head.scenario,
        number=head.number + 1,
        parent_id=head.release_id,
        kind=ReleaseKind.TRAINED,
        content_id=f"content of {release_id}",
        runtime_load_id=f"engine:{head.number + 1}",
        created_at=2.0,
        metrics={"loss": 0.5},
    )


def training(commit_id: str, head: Release, consumed: list[str]) -> Commit:
    """A commit that releases what `consumed` trained."""
    return Commit(
        commit_id=commit_id,
        scenario=head.scenario,
        kind=CommitKind.TRAINED,
        created_at=3.0,
        job_id=f"job of {commit_id}",
        expected_head=head.release_id,
        release=following(head, f"release of {commit_id}"),
        consumed=[Consumption(record_id, Disposition.TRAINED, "batch") for record_id in consumed],
        algorithm_state={"baseline": 0.5, "seen": len(consumed)},
        metrics={"loss": 0.25},
    )


def discard(commit_id: str, consumed: list[str], scenario: str = "s") -> Commit:
    return Commit(
        commit_id=commit_id,
        scenario=scenario,
        kind=CommitKind.DISCARDED,
        created_at=3.0,
        consumed=[Consumption(record_id, Disposition.STALE) for record_id in consumed],
    )
