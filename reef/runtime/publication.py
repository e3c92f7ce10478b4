"""Moving weights into engines: stage, prove by effect, pause, switch, verify; and putting committed heads back."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from reef.errors import BarrierError, EngineError, EngineUncertain, Unavailable, VerificationError, WorkerDied
from reef.points import Point, crossing
from reef.runtime.interfaces import (
    BASE_LOAD_ID,
    Candidate,
    ContentStore,
    EngineReport,
    InferenceBackend,
    MemoryRegion,
    MemoryReport,
    PauseMode,
    Release,
    WeightKind,
    WeightLoad,
)
from reef.runtime.pause_clock import PauseClock
from reef.runtime.residency import Residency

log = logging.getLogger("reef.publication")

NUM_PROBE_TOKENS = 64
WAITED = "pause_wait_seconds"
"""In the stats of an engine's report: how long the newest pause waited for the step in progress."""


def probe_ids(vocab_size: int) -> list[int]:
    """The fixed probe: token ids spread over the vocabulary, the same for every release. [NUM_PROBE_TOKENS]"""
    return [(17 + 7919 * position) % vocab_size for position in range(NUM_PROBE_TOKENS)]


def weight_kind(content: Path) -> WeightKind:
    """What the bytes of a content directory are."""
    return WeightKind.LORA if (content / "adapter_config.json").exists() else WeightKind.FULL


class Publication:
    """Owns the engines' weights for the coordinator. It alone pauses, resumes and restarts inference."""

    def __init__(
        self,
        engines: InferenceBackend,
        contents: ContentStore,
        pause_mode: PauseMode,
        base_content_id: str,
        probe: list[int],
    ) -> None:
        self._engines = engines
        self._contents = contents
        self._pause_mode = pause_mode
        self._base_content_id = base_content_id
        self._probe = probe
        self._residency = Residency(engines)
        self._heads: dict[str, Release] = {}  # replaced, never changed: others read it meanwhile
        self._heads_lock = Lock()  # for who replaces it
        self._incomplete: str | None = None  # why the engines are not what `restore` makes of them
        self.generation = 0  # how often the engines were replaced
        self._renewed = False  # they were, are paused, and nothing was staged and nobody served since
        self.clock = PauseClock()  # runs from the barrier's start to its end
        self._lanes: dict[str, str] = {}  # what they were pointed at last; others serve their heads
        self._replaced: dict[str, str] = {}  # scenario -> load that its newest head took over from

    def load_of(self, runtime_load_id: str, content_id: str) -> WeightLoad:
        """Describe a load; base content needs no bytes, and the directory itself tells adapters from full weights."""
        if content_id == self._base_content_id:
            return WeightLoad(runtime_load_id=runtime_load_id, content_id=content_id, kind=WeightKind.FULL, path=None)
        path = self._contents.path(content_id)
        kind = weight_kind(path)
        return WeightLoad(runtime_load_id=runtime_load_id, content_id=content_id, kind=kind, path=str(path))

    # ------------------------------------------------------------------ candidates

    def stage(self, candidate: Candidate) -> None:
        """Make the candidate resident on every engine, serving nobody, and prove that it is really applied.

        Engines that cannot hold it beside what they serve only take note; `switch` then loads and verifies it.
        Raises EngineError, EngineUncertain, VerificationError.
        """
        self._require_complete()
        self._renewed = False
        load = self.load_of(candidate.runtime_load_id, candidate.content_id)
        with crossing(Point.STAGE):
            self._residency.stage(load, self._current().values(), pin=True)
        if not self._engines.stages(load):
            return
        with crossing(Point.PROBE):
            self._prove(candidate)

    def _prove(self, candidate: Candidate) -> None:
        served = self._engines.score(candidate.runtime_load_id, self._probe)
        if candidate.content_id == self._base_content_id:
            if served != self._engines.score(BASE_LOAD_ID, self._probe):
                raise VerificationError(f"{candidate.runtime_load_id} does not serve the base model")
            return
        incumbent = self._engines.score(self._heads[candidate.scenario].runtime_load_id, self._probe)
        verify_effect(candidate, served, incumbent, self._engines.probe_tolerance)

    def pause(self) -> None:
        """The barrier; that it is wanted is noted first. Raises BarrierError: then the engines are retired."""
        self._require_complete()
        self.clock.start()
        with crossing(Point.PAUSE):
            try:
                self._engines.pause(self._pause_mode)
            except (BarrierError, WorkerDied) as error:
                self._incomplete = f"recoverable: the engines are to be replaced, the pause barrier failed: {error}"
                raise BarrierError(f"the pause barrier failed: {error}") from error
        self.clock.lap("barrier")

    def switch(self, candidate: Candidate) -> None:
        """Point the lane at the staged candidate while paused; verify it on every engine. Raises VerificationError."""
        self._require_complete()
        with crossing(Point.SWITCH):
            self._activate(candidate.scenario, candidate.runtime_load_id)
        self.clock.lap("switch")
        with crossing(Point.VERIFY):
            self._verify_switch(candidate)
        self.clock.lap("verify")

    def _verify_switch(self, candidate: Candidate) -> None:
        reports = self._engines.reports()
        self.clock.split(
            "barrier", "step in progress", max((one.stats.get(WAITED, 0.0) for one in reports), default=0.0)
        )
        for report in reports:
            lane = report.lanes.get(candidate.scenario)
            content = report.loads.get(candidate.runtime_load_id)
            if lane != candidate.runtime_load_id or content != candidate.content_id or not report.paused:
                raise VerificationError(
                    f"{report.engine}: lane {candidate.scenario!r} serves {lane} ({content}, paused={report.paused}), "
                    f"expected {candidate.runtime_load_id} ({candidate.content_id}, paused=True)"
                )

    def commit_head(self, release: Release) -> None:
        """The store says that this is the head: engines that are replaced from here on must get it."""
        previous = self._heads.get(release.scenario)
        if previous is not None and previous.runtime_load_id != release.runtime_load_id:
            self._replaced[release.scenario] = previous.runtime_load_id
        self._set_heads(release)

    def finish(self, release: Release) -> None:
        """After `commit_head`: resume, then retire what the release replaced."""
        self._require_complete()
        self._resume()
        replaced = self._replaced.pop(release.scenario, None)
        self._residency.release(release.runtime_load_id, replaced, self._current().values())

    def withdraw(self, candidate: Candidate) -> None:
        """Put the incumbent back if the candidate was switched in, resume if paused, free the candidate."""
        self._require_complete()
        head = self._heads[candidate.scenario]
        if self._lanes.get(candidate.scenario, head.runtime_load_id) != head.runtime_load_id:
            if not self.clock.running:
                self.pause()
            self._activate(candidate.scenario, head.runtime_load_id)
        if self.clock.running:
            self._resume()
        self._residency.drop(candidate.runtime_load_id)

    def _activate(self, lane: str, runtime_load_id: str) -> None:
        self._lanes[lane] = runtime_load_id
        self._engines.activate(lane, runtime_load_id)

    def _resume(self) -> None:
        self._renewed = False
        with crossing(Point.RESUME):
            self._engines.resume()
        self.clock.lap("resume")
        self.clock.stop()

    # ------------------------------------------------------------------ residency

    def require_slot(self, scenario: str, content_id: str | None = None) -> None:
        """Raises Unavailable unless the other heads, one of this scenario and a candidate all find a slot.

        The slot for candidates is never given to a head: else nobody could publish again. The base needs none.
        """
        if content_id == self._base_content_id:
            return
        slots = self._engines.max_loads
        base = self._base_content_id
        others = {
            name: head.content_id for name, head in self._heads.items() if name != scenario and head.content_id != base
        }
        if len(set(others.values())) + 2 > slots:
            names = ", ".join(sorted(others)[:5]) + (", ..." if len(others) > 5 else "")
            raise Unavailable(
                f"scenario {scenario!r} cannot be published: inference.max-loads ({slots}) leaves room for "
                f"{slots - 1} scenarios with weights of their own, and {len(others)} others have them ({names}); "
                "raise it, or roll one of them back to its release 0",
                retry_after=30.0,
            )

    def residency(self) -> dict[str, Any]:
        return self._residency.status(self._current())

    def _current(self) -> dict[str, str]:
        return {name: head.runtime_load_id for name, head in self._heads.items()}

    # ------------------------------------------------------------------ committed heads

    def remember(self, release: Release) -> None:
        """A scenario was created: its head is the base load, which every engine has. Waits for nothing."""
        with self._heads_lock:
            self._heads = {release.scenario: release} | self._heads

    def _set_heads(self, *releases: Release) -> None:
        with self._heads_lock:
            self._heads = self._heads | {release.scenario: release for release in releases}

    def restore(self, heads: Sequence[Release], *, resume: bool) -> None:
        """Bring engines that have only the base load to the committed heads, under their original load IDs."""
        self._set_heads(*heads)
        self._incomplete = "recoverable: the engines do not serve the committed heads yet"
        with crossing(Point.RESTORE):
            self._restore(heads)
        if resume:
            self.clock.cancel()  # this was no publication
            self._resume()
        self._incomplete = None

    def _restore(self, heads: Sequence[Release]) -> None:
        self.clock.start()
        self._lanes, self._replaced = {}, {}
        self._residency.clear()
        self._engines.pause(PauseMode.IN_PLACE)
        for head in heads:
            self._residency.stage(self.load_of(head.runtime_load_id, head.content_id), self._current().values())
            self._activate(head.scenario, head.runtime_load_id)
        reports = self._engines.reports()
        for report in reports:
            wrong = {head.scenario for head in heads if not _serves(report, head)}
            if wrong:
                raise VerificationError(f"{report.engine}: lanes {sorted(wrong)} do not serve their committed heads")
        known = {BASE_LOAD_ID, *self._current().values()}
        for load in {load for report in reports for load in report.loads} - known:  # of engines that served before
            self._residency.drop(load)

    def prepare_recovery(self, heads: Sequence[Release]) -> None:
        """At a start, of the service or the coordinator: `restore`; engines that do not get there are replaced."""
        try:
            self.restore(heads, resume=True)
        except (BarrierError, EngineError, VerificationError, WorkerDied) as error:
            log.warning("the engines are replaced at once: %s", error)
            self.rebuild(resume=True)

    # ------------------------------------------------------------------ memory

    def lend(self, regions: Collection[MemoryRegion]) -> list[MemoryReport]:
        """Send every request back to the queue and free `regions` of every engine, until `reclaim`.

        Whatever it raises (BarrierError, EngineUncertain, WorkerDied): the engines are unusable until replaced.
        """
        self._require_complete()
        with self._usable_only_after("releasing the engines' memory"):
            with crossing(Point.PAUSE):
                self._engines.pause(PauseMode.RETRACT)
            with crossing(Point.MEMORY_RELEASE):
                reports = self._engines.release_memory(regions)
            for report in reports:
                if missing := set(regions) - set(report.released):
                    raise EngineUncertain(f"{report.owner} did not release {', '.join(sorted(missing))}")
        return reports

    def reclaim(self, *, resume: bool) -> list[MemoryReport]:
        """Take the memory back, load the committed heads under their own load IDs, and serve. Raises as `lend`."""
        self._require_complete()
        with self._usable_only_after("restoring the engines' memory"):
            with crossing(Point.MEMORY_RESTORE):
                reports = self._engines.restore_memory()
            for report in reports:
                if report.released:
                    raise EngineUncertain(f"{report.owner} did not restore {', '.join(sorted(report.released))}")
            with crossing(Point.RESTORE):
                self._restore(list(self._heads.values()))
            self.clock.cancel()  # this was no publication
            if resume:
                self._resume()
        return reports

    def retire(self, reason: str) -> None:
        """The engines are unusable until they are replaced."""
        self._incomplete = reason

    @contextmanager
    def _usable_only_after(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.retire(f"{what} failed: {error}")
            raise

    # ------------------------------------------------------------------ replacement

    def rebuild(self, *, resume: bool) -> None:
        """Replace every engine, then restore the committed heads."""
        self._incomplete = "recoverable: the engines are not replaced yet"
        self._renewed = False
        with crossing(Point.RESTART_ENGINES):
            self._engines.restart()
        self.generation += 1
        self.restore(list(self._heads.values()), resume=resume)
        self._renewed = not resume

    def renew(self) -> None:
        """Have fresh engines with the committed heads alone, paused: `rebuild`, unless a repair just left such."""
        if not self._renewed or self.health() is not None:
            self.rebuild(resume=False)

    def _require_complete(self) -> None:
        """Whoever resumed engines that were restored in part would serve the base in place of a head."""
        if self._incomplete is not None:
            raise EngineUncertain(self._incomplete)

    def health(self) -> str | None:
        """None when every engine is healthy and holds the committed heads, else the reason."""
        engines, incomplete = self._engines.health(), self._incomplete
        if engines is None or incomplete is None or engines in incomplete:
            return incomplete or engines
        return f"{incomplete}; {engines}"


def _serves(report: EngineReport, head: Release) -> bool:
    return (
        report.lanes.get(head.scenario) == head.runtime_load_id
        and report.loads.get(head.runtime_load_id) == head.content_id
    )


def verify_effect(
    candidate: Candidate, served: list[list[float]], incumbent: list[list[float]], tolerance: float
) -> None:
    """Compare what each engine serves on the probe with what the trainer computed. Raises VerificationError.

    Closeness alone would let a small update pass that was never applied; such an engine still gives exactly the
    incumbent's numbers although the trainer's differ, and that is refused as well.
    """
    expected = candidate.probe_logprobs
    if not expected:  # a release from before probes were kept
        return
    moved = expected != candidate.incumbent_probe_logprobs
    for engine, (now, before) in enumerate(zip(served, incumbent, strict=True)):
        worst = max(abs(a - b) for a, b in zip(now, expected, strict=True))
        if not worst <= tolerance:  # NaN fails too
            raise VerificationError(
                f"engine-{engine} serves {candidate.runtime_load_id} {worst:.4f} nat away from the trainer "
                f"on the probe (tolerance {tolerance})"
            )
        if moved and now == before:
            raise VerificationError(
                f"engine-{engine} serves {candidate.runtime_load_id} exactly like the incumbent: it was never applied"
            )
