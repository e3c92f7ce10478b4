"""The release chain as values: what comes next, and what a rollback goes back to. Pure functions; nothing is stored."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from reef.errors import Conflict, NotFound
from reef.runtime.interfaces import BASE_LOAD_ID, Candidate, Evaluation, Release, ReleaseKind


def base_release(
    scenario: str, content_id: str, created_at: float, metrics: dict[str, object] | None = None
) -> Release:
    """Release 0: the base model as every engine starts with it."""
    return Release(
        release_id=_release_id(scenario, 0, content_id, ""),
        scenario=scenario,
        number=0,
        parent_id=None,
        kind=ReleaseKind.BASE,
        content_id=content_id,
        runtime_load_id=BASE_LOAD_ID,
        created_at=created_at,
        metrics=dict(metrics or {}),
    )


def next_release(head: Release, candidate: Candidate, evaluation: Evaluation, created_at: float) -> Release:
    """The release that follows `head` when `candidate` is committed, whatever its origin.

    The same arguments but for the time give the same release_id, so that a commit may be retried after a restart.
    """
    if candidate.scenario != head.scenario:
        raise ValueError(f"candidate {candidate.job_id} is of {candidate.scenario}, the head is of {head.scenario}")
    if candidate.origin is ReleaseKind.BASE:
        raise ValueError("a base release only begins a chain")
    if (candidate.source_release_id is None) != (candidate.origin is ReleaseKind.TRAINED):
        raise ValueError(f"{candidate.origin} with source_release_id {candidate.source_release_id}")
    number = head.number + 1
    return Release(
        release_id=_release_id(head.scenario, number, candidate.content_id, candidate.job_id),
        scenario=head.scenario,
        number=number,
        parent_id=head.release_id,
        kind=candidate.origin,
        content_id=candidate.content_id,
        runtime_load_id=candidate.runtime_load_id,
        created_at=created_at,
        state_id=candidate.state_id,
        job_id=candidate.job_id,
        source_release_id=candidate.source_release_id,
        metrics={
            **candidate.metrics,
            "evaluation": evaluation.scores,
            "probe_logprobs": candidate.probe_logprobs,
        },
    )


def rollback_target(releases: Sequence[Release], head: Release, release_id: str | None = None) -> Release:
    """The release whose content a rollback of `head` serves again; `releases` is the scenario's history, any order.

    Without `release_id`: the version before the one that is served. A rollback counts as the version it went back
    to, so rolling back twice goes two versions back instead of undoing the first. Raises NotFound, Conflict.
    """
    known = {release.release_id: release for release in releases}
    if release_id is not None:
        if release_id not in known:
            raise NotFound(f"scenario {head.scenario} has no release {release_id}")
        target = _original(known, known[release_id])
        if target.content_id == head.content_id:
            raise Conflict(f"release {head.release_id} serves the content of {release_id} already")
        return target
    target = _original(known, head)
    while target.content_id == head.content_id:
        if target.parent_id is None:
            raise Conflict(f"nothing to roll back to: {head.release_id} serves the oldest version of {head.scenario}")
        target = _original(known, _lookup(known, target.parent_id))
    return target


def _original(known: dict[str, Release], release: Release) -> Release:
    """The release that first brought the content which a rollback serves again."""
    while release.kind is ReleaseKind.ROLLBACK and release.source_release_id is not None:
        release = _lookup(known, release.source_release_id)
    return release


def _lookup(known: dict[str, Release], release_id: str) -> Release:
    if release_id not in known:
        raise NotFound(f"release {release_id} is missing from the history")
    return known[release_id]


def _release_id(scenario: str, number: int, content_id: str, job_id: str) -> str:
    identity = "\0".join((scenario, str(number), content_id, job_id)).encode("utf-8", "surrogatepass")
    return f"release-{number}-{hashlib.sha256(identity).hexdigest()[:12]}"
