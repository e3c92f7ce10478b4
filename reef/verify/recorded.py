"""The recorded answers of a data directory, checked against the weights that their spans name. Writes nothing."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from reef.artifact.base import Serving, base_content_id, read_serving
from reef.artifact.content import contents_of, verify_content
from reef.errors import ConfigError, DamagedRecord, NotFound, StorageError, VerificationError
from reef.records.opening import storage_at
from reef.runtime.interfaces import Generation, InferenceRecord, PauseMode, RecordKind, Release, Span, Storage
from reef.verify.report import Problem, ReleaseReport, Report, ScenarioReport

_PAGE = 100
_ALL = 10_000_000
_URL = re.compile(r"(sqlite|postgres(ql)?):")
# nats; largest honest difference of an engine from a float32 reference
_TOLERANCES = {"bfloat16": 1.0, "float16": 0.1}
_FLOAT32_TOLERANCE = 1e-3


@dataclass(slots=True, kw_only=True)
class Selection:
    """Which answers. None is no bound; times are Unix seconds, `until` excluded."""

    scenario: str | None = None
    sample: int | None = None  # so many of each scenario, drawn with `seed`
    since: float | None = None
    until: float | None = None
    seed: int = 0


Progress = Callable[[str, int, int], None]
"""Called with the scenario, the records done and the records known so far."""


async def check(
    data: Path,
    selection: Selection,
    *,
    model_path: Path | None = None,
    database: str | None = None,
    tolerance: float | None = None,
    progress: Progress = lambda scenario, done, known: None,
) -> Report:
    """Re-score what `selection` names. A service may be running on the directory, or not.

    `database` is a file, or what `storage_at` takes; without it, where the directory says its records are.

    Raises ConfigError, NotFound (no such scenario) and StorageError before anything is scored; whatever is wrong with
    single answers or contents is in the report.
    """
    serving = read_serving(data)
    if serving is None:
        if model_path is None:
            raise ConfigError(f"{data} does not say which base model it was served with: give --model-path")
        serving = Serving("", "")
    model = model_path or Path(serving.model_path)
    if tolerance is None:
        tolerance = _TOLERANCES.get(serving.dtype, _FLOAT32_TOLERANCE)
    place = database or serving.database or str(data / "reef.db")
    storage = storage_at(place if _URL.match(place) else f"sqlite:{place}", read_only=True)
    contents = contents_of(Path(serving.artifacts) if serving.artifacts else data / "artifacts")
    await storage.open()
    try:
        states = await storage.scenarios()
        names = [state.scenario for state in states if selection.scenario in (None, state.scenario)]
        if not names and selection.scenario is not None:
            known = ", ".join(state.scenario for state in states) or "none"
            raise NotFound(f"there is no scenario {selection.scenario!r} in {data}; there are: {known}")
        base_id = base_content_id(model, data / "base-model.json", keep=False)
        report = Report(str(model), tolerance)
        verifier = _Verifier(storage, contents, model, base_id, tolerance)
        for name in names:
            report.scenarios.append(await verifier.scenario(name, selection, progress))
        return report
    finally:
        await storage.close()


class _Verifier:
    def __init__(self, storage: Storage, contents: Path, model: Path, base_id: str, tolerance: float) -> None:
        from reef.verify.reference import Reference

        self._storage = storage
        self._contents = contents
        self._base_id = base_id
        self._tolerance = tolerance
        self._reference = Reference(model, self._contents, base_id, tolerance=tolerance)
        self._content_faults: dict[str, str | None] = {base_id: None}

    async def scenario(self, name: str, selection: Selection, progress: Progress) -> ScenarioReport:
        report = ScenarioReport(name)
        releases = (await self._storage.releases(name, limit=_ALL))[::-1]
        if releases[0].content_id != self._base_id:
            raise ConfigError(
                f"scenario {name!r} was begun on another base model than the one given "
                f"({releases[0].content_id[:12]}, not {self._base_id[:12]}): give its --model-path"
            )
        found = {release.runtime_load_id: (release, ReleaseReport.of(release)) for release in releases}
        report.releases = [one for _, one in found.values()]
        known = (await self._storage.counts(name))[RecordKind.INFERENCE]
        done = 0
        async for record in self._selected(name, selection, report):
            for index, generation in enumerate(record.generations):
                fault = self._generation(record, generation, found, report)
                if fault is not None:
                    where = f"choice {index}: " if len(record.generations) > 1 else ""
                    report.problems.append(Problem(record.record_id, where + fault))
            done += 1
            progress(name, done, min(known, selection.sample or known))
        return report

    def _generation(
        self,
        record: InferenceRecord,
        generation: Generation,
        found: dict[str, tuple[Release, ReleaseReport]],
        report: ScenarioReport,
    ) -> str | None:
        """Score one answer into the reports of its releases; return what is wrong with it."""
        from reef.verify.reference import Weights

        if fault := _shape_fault(generation):
            return fault
        if not generation.output_ids:
            report.unanswered += 1
            return None
        weights = {}
        for span in generation.spans:
            if span.runtime_load_id not in found:
                return f"{_tokens(span)} name {span.runtime_load_id}, which no release of the scenario ever was"
            release = found[span.runtime_load_id][0]
            if fault := self._content_fault(release.content_id):
                return f"{_tokens(span)} name release {release.number}: {fault}"
            frozen = release.metrics.get("pause_mode") != PauseMode.RETRACT
            weights[span.runtime_load_id] = Weights(release.content_id, frozen)
        scores = self._reference.rescore(
            generation.prompt_ids, generation.output_ids, generation.logprobs, generation.spans, weights
        )
        report.answers += 1
        faults = []
        for span, score in zip(generation.spans, scores, strict=True):
            differences = score.differences.tolist()
            release, its_report = found[span.runtime_load_id]
            its_report.add(record.record_id, differences, score.frozen, self._tolerance)
            if over := [index for index, one in enumerate(differences) if not one <= self._tolerance]:
                worst = max(differences[index] for index in over)
                faults.append(
                    f"{len(over)} of {_tokens(span)} are off release {release.number} ({span.runtime_load_id}), the "
                    f"first is token {span.start + over[0]}, the worst by {worst:.6f} nat"
                )
        return "; ".join(faults) or None

    def _content_fault(self, content_id: str) -> str | None:
        """None if the bytes are those that were released; each content is read once."""
        if content_id not in self._content_faults:
            self._content_faults[content_id] = None
            try:
                if not (self._contents / content_id).is_dir():
                    raise VerificationError(f"content {content_id} is not in {self._contents}")
                verify_content(self._contents / content_id)
            except (StorageError, VerificationError) as error:
                self._content_faults[content_id] = str(error)
        return self._content_faults[content_id]

    async def _selected(
        self, name: str, selection: Selection, report: ScenarioReport
    ) -> AsyncIterator[InferenceRecord]:
        records = self._records(name, selection, report)
        if selection.sample is None:
            async for record in records:
                yield record
            return
        luck = random.Random(selection.seed)
        kept: list[InferenceRecord] = []  # a uniform sample at any time (algorithm R, Vitter 1985)
        seen = 0
        async for record in records:
            seen += 1
            if len(kept) < selection.sample:
                kept.append(record)
            elif (place := luck.randrange(seen)) < selection.sample:
                kept[place] = record
        for record in sorted(kept, key=lambda one: one.sequence):
            yield record

    async def _records(self, name: str, selection: Selection, report: ScenarioReport) -> AsyncIterator[InferenceRecord]:
        """In order; those whose bytes are damaged become problems."""
        after, limit = 0, _PAGE
        while True:
            try:
                page = await self._storage.page(
                    name,
                    kind=RecordKind.INFERENCE,
                    after=after,
                    since=selection.since,
                    until=selection.until,
                    limit=limit,
                )
            except DamagedRecord as error:
                if limit == 1:  # one at a time, up to the damaged one
                    report.problems.append(Problem(None, str(error)))
                    after, limit = error.sequence, _PAGE
                else:
                    limit = 1
                continue
            if not page:
                return
            for record in page:
                if isinstance(record, InferenceRecord):
                    yield record
            after = page[-1].sequence


def _shape_fault(generation: Generation) -> str | None:
    """Spans cover the output exactly once, and every token has its log-probability."""
    count = len(generation.output_ids)
    if len(generation.logprobs) != count:
        return f"{count} tokens have {len(generation.logprobs)} log-probabilities"
    edge = 0
    for span in generation.spans:
        if span.start != edge or span.end <= span.start:
            return f"the spans do not cover the output exactly once: {_edges(generation.spans)}"
        edge = span.end
    if edge != count:
        return f"the spans cover {edge} of {count} tokens: {_edges(generation.spans)}"
    return None


def _tokens(span: Span) -> str:
    return f"tokens {span.start} to {span.end}"


def _edges(spans: Iterable[Span]) -> str:
    return ", ".join(f"[{span.start}, {span.end}) {span.runtime_load_id}" for span in spans) or "none"
