"""The scored processor: from reports with a score to batches.

A *unit* is what trains together: one report that names no group, or all reports of one group. Its life::

    report ──ingest──► unit waits ──complete, old enough──► built into a batch ──acknowledge──► forgotten
                 │          └──expire: too stale──► consumed
                 └──never trains──► consumed

Everything here is decided by the records' own times and sequence numbers, so a processor that is rebuilt from the
unconsumed reports after a restart goes on as this one would have. (It only forgets which members of a group failed, and
waits `group-wait` for them.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from reef.errors import ConfigError, InvalidRequest
from reef.recipe.advantages import RunningBaseline, group_relative, leave_one_out
from reef.recipe.config import RecipeConfig
from reef.recipe.eligibility import Refusal, choose, refuse_record
from reef.recipe.reports import ScoredReport, parse_report
from reef.recipe.units import Member, Sample, Scored, Unit
from reef.runtime.interfaces import (
    Batch,
    Consumption,
    Disposition,
    InferenceRecord,
    Processor,
    ReportRecord,
    TrainSample,
)

REMEMBERED = 65_536
"""Consumed ids kept in memory. Older ones are known from the store, which `ingest` is told about."""

MAX_REASON = 500
"""Characters of a grader's error that are logged and kept as the reason; the report itself has all of it."""


@dataclass(slots=True, frozen=True)
class _Built:
    batch: Batch
    units: list[Unit]
    baseline: RunningBaseline  # as it is once the batch is committed


class ScoredProcessor(Processor):
    """Builds batches from scored reports. Raises ConfigError for a committed state that is not its own."""

    def __init__(self, config: RecipeConfig, algorithm_state: Mapping[str, Any]) -> None:
        self._config = config
        self._baseline = _baseline(algorithm_state)
        self._units: list[Unit] = []
        self._open: dict[str, Unit] = {}  # groups that still take reports
        self._waiting: set[str] = set()  # report ids in units
        self._claims: dict[str, Unit] = {}  # record id -> the unit that trains it
        self._spent: dict[str, Disposition] = {}
        self._refused: Counter[str] = Counter()
        self._built: _Built | None = None
        self._now = 0.0

    # ---------------------------------------------------------------------------------------------- what comes in

    def ingest(
        self,
        report: ReportRecord,
        records: Mapping[str, InferenceRecord],
        consumed: Mapping[str, Disposition] | None = None,
    ) -> list[Consumption]:
        """The first report on an answer counts; a later one is consumed as "already scored"."""
        if report.record_id in self._waiting or report.record_id in self._spent:
            return []
        self._now = max(self._now, report.created_at)
        try:
            parsed = parse_report(report)
        except InvalidRequest as error:
            return [self._consume(report.record_id, Refusal("malformed", Disposition.INELIGIBLE, str(error)))]
        if report.error is not None:
            reason = report.error[:MAX_REASON]
            return [self._refuse(report, parsed, Refusal("grader_error", Disposition.INELIGIBLE, reason))]
        if parsed.score is None:
            return [self._consume(report.record_id, Refusal("no_score", Disposition.INELIGIBLE, "no score"))]
        samples, refusals, written_off = self._samples(report, parsed, records, consumed or {})
        if not samples:
            return [*written_off, self._refuse(report, parsed, refusals[0])]
        unit = self._unit(report, parsed)
        score = self._clip(parsed.score)
        unit.add(Scored(report.record_id, report.sequence, report.created_at, _member(report, parsed), score, samples))
        self._waiting.add(report.record_id)
        self._claims.update((sample.record_id, unit) for sample in samples)
        return written_off

    def _samples(
        self,
        report: ReportRecord,
        parsed: ScoredReport,
        records: Mapping[str, InferenceRecord],
        consumed: Mapping[str, Disposition],
    ) -> tuple[list[Sample], list[Refusal], list[Consumption]]:
        """The answers that this report scores, why others are not among them, and the records that never can be."""
        samples: list[Sample] = []
        refusals: list[Refusal] = []
        written_off: list[Consumption] = []
        for record_id in dict.fromkeys(report.references):
            refusal = self._taken(record_id, parsed, consumed)
            if refusal is None and record_id not in records:
                refusal = Refusal("unknown_reference", Disposition.INELIGIBLE, f"unknown receipt {record_id}")
            if refusal is None and (refusal := refuse_record(records[record_id], self._config.train_on_length)):
                written_off.append(self._spend(record_id, refusal))
            chosen = refusal or self._choose(records[record_id], parsed.choice)
            if isinstance(chosen, Refusal):
                refusals.append(chosen)
            else:
                samples.append(chosen)
        return samples, refusals, written_off

    def _taken(self, record_id: str, parsed: ScoredReport, consumed: Mapping[str, Disposition]) -> Refusal | None:
        if (disposition := self._spent.get(record_id) or consumed.get(record_id)) is not None:
            reason = f"already consumed: {record_id} ({disposition})"
            return Refusal("already_consumed", Disposition.INELIGIBLE, reason)
        owner = self._claims.get(record_id)
        if owner is not None and (parsed.group is None or owner is not self._open.get(parsed.group)):
            reason = f"already scored: {record_id}; reports on several choices of one request must share metadata.group"
            return Refusal("already_scored", Disposition.INELIGIBLE, reason)
        return None

    def _choose(self, record: InferenceRecord, choice: int | None) -> Sample | Refusal:
        index = choose(record, choice, self._config.train_on_length)
        if isinstance(index, Refusal):
            return index
        owner = self._claims.get(record.record_id)
        if owner is not None and any((s.record_id, s.choice) == (record.record_id, index) for s in owner.samples()):
            return Refusal("already_scored", Disposition.INELIGIBLE, f"already scored: {record.record_id}")
        return Sample(record.record_id, index, record.release_id, record.generations[index])

    def _unit(self, report: ReportRecord, parsed: ScoredReport) -> Unit:
        """The open unit that this report belongs to, made if there is none."""
        unit = self._open.get(parsed.group) if parsed.group is not None else None
        if unit is None:
            unit = Unit(parsed.group, report.created_at, report.created_at)
            self._units.append(unit)
            if parsed.group is not None:
                self._open[parsed.group] = unit
        unit.last_at = max(unit.last_at, report.created_at)
        if parsed.group_size is not None:
            unit.size = max(unit.size or 0, parsed.group_size)
        return unit

    def _clip(self, score: float) -> float:
        low, high = self._config.score_min, self._config.score_max
        score = score if low is None else max(low, score)
        return score if high is None else min(high, score)

    def _refuse(self, report: ReportRecord, parsed: ScoredReport, refusal: Refusal) -> Consumption:
        """Consume a report that judged something; its group no longer waits for that member."""
        if parsed.group is not None and refusal.kind not in ("already_scored", "already_consumed"):
            self._unit(report, parsed).failed.add(_member(report, parsed))
        return self._consume(report.record_id, refusal)

    def _consume(self, report_id: str, refusal: Refusal) -> Consumption:
        self._refused[refusal.kind] += 1
        return self._spend(report_id, refusal)

    def _spend(self, record_id: str, refusal: Refusal) -> Consumption:
        self._remember(record_id, refusal.disposition)
        return Consumption(record_id, refusal.disposition, refusal.reason)

    def _remember(self, record_id: str, disposition: Disposition) -> None:
        self._claims.pop(record_id, None)
        self._waiting.discard(record_id)
        self._spent[record_id] = disposition
        if len(self._spent) > REMEMBERED:
            del self._spent[next(iter(self._spent))]

    # ---------------------------------------------------------------------------------------------- what goes out

    def expire(self, step: int, now: float, release_numbers: Mapping[str, int]) -> list[Consumption]:
        """Staleness is the head's number minus that of the record's release; a release not listed is too old.

        What is in the batch being built stays: its job may have begun. With no `release_numbers`, nothing is stale.
        """
        self._now = now
        written_off: list[Consumption] = []
        bound = self._config.max_staleness
        if bound is not None and release_numbers:
            head = max(release_numbers.values())
            ages = {release: head - number for release, number in release_numbers.items()}
            fresh = {release for release, age in ages.items() if age <= bound}
            for unit in self._free():
                stale = {sample.record_id: sample for sample in unit.samples() if sample.release_id not in fresh}
                if stale:
                    reasons = {name: _stale(sample.release_id, ages, bound) for name, sample in stale.items()}
                    written_off += self._expire(unit, reasons)
        self._sweep()
        return written_off

    def _expire(self, unit: Unit, stale: Mapping[str, str]) -> list[Consumption]:
        """Take the records in `stale`, which says why, out of the unit."""
        written_off = [
            self._spend(record_id, Refusal("stale", Disposition.STALE, reason)) for record_id, reason in stale.items()
        ]
        for report in unit.reports:
            reason = next((stale[sample.record_id] for sample in report.samples if sample.record_id in stale), "")
            report.samples = [sample for sample in report.samples if sample.record_id not in stale]
            if not report.samples:
                unit.failed.add(report.member)
                written_off.append(self._consume(report.report_id, Refusal("stale", Disposition.STALE, reason)))
        unit.reports = [report for report in unit.reports if report.samples]
        return written_off

    def ready(self, now: float) -> bool:
        """True when a batch is built, or when enough answers may train, groups of equal scores included."""
        self._now = now
        if self._built is not None:
            return True
        samples = (1 for unit in self._trainable(now) for _ in unit.samples())
        return sum(islice(samples, self._config.batch_size)) >= self._config.batch_size

    def build(self, now: float) -> Batch:
        """Oldest units first, whole, until `batch-size` answers with signal are in or nothing is left.

        Units without signal are consumed along the way and do not count. Nothing trainable: an empty batch, which is
        not kept.
        """
        self._now = now
        if self._built is None:
            units = self._pick(now)
            if not units:
                return Batch(samples=[], consumed=[], metrics={}, signal=False)
            self._built = self._assemble(units)
            for unit in units:
                if unit.group is not None and self._open.get(unit.group) is unit:
                    del self._open[unit.group]
        return self._built.batch

    def acknowledge(self, batch: Batch) -> None:
        """Forget what `batch` consumed; the running baseline moves on if it is the batch being built."""
        consumed = {consumption.record_id: consumption.disposition for consumption in batch.consumed}
        if self._built is not None:
            # By id: a rejected batch comes back with other dispositions.
            building = {consumption.record_id for consumption in self._built.batch.consumed}
            if consumed.keys() == building:
                self._baseline = self._built.baseline
            if consumed.keys() & building:
                self._built = None
        for record_id, disposition in consumed.items():
            self._remember(record_id, disposition)
        for unit in self._units:
            for report in unit.reports:
                report.samples = [sample for sample in report.samples if sample.record_id not in consumed]
            unit.reports = [report for report in unit.reports if report.samples and report.report_id not in consumed]
        self._waiting = {report.report_id for unit in self._units for report in unit.reports}
        self._sweep()

    def state(self) -> dict[str, Any]:
        """The running baseline with the scores of the batch being built, if there is one."""
        baseline = self._baseline if self._built is None else self._built.baseline
        return {"baseline": baseline.to_json()}

    def counts(self) -> dict[str, int]:
        """Reports that wait, as of the last call that told the time; then reports refused since the start."""
        waiting = Counter(dict.fromkeys(("ready", "too_young", "waiting_for_group"), 0))
        samples = 0
        for unit in self._free():
            reason = unit.waits(self._now, self._config)
            waiting[reason or "ready"] += len(unit.reports)
            samples += 0 if reason else sum(1 for _ in unit.samples())
        built = [] if self._built is None else self._built.units
        return {
            "pending": sum(waiting.values()),
            **waiting,
            "ready_samples": samples,
            "in_batch": sum(len(unit.reports) for unit in built),
            **{f"refused.{kind}": number for kind, number in self._refused.items()},
        }

    def _free(self) -> list[Unit]:
        built = set() if self._built is None else set(self._built.units)
        return [unit for unit in self._units if unit not in built]

    def _trainable(self, now: float) -> Iterator[Unit]:
        return (unit for unit in self._units if unit.reports and unit.waits(now, self._config) is None)

    def _sweep(self) -> None:
        """Drop units that have no reports and wait for none."""
        self._units = [unit for unit in self._units if unit.reports or not unit.complete(self._now, self._config)]
        kept = set(self._units)
        self._open = {group: unit for group, unit in self._open.items() if unit in kept}

    def _pick(self, now: float) -> list[Unit]:
        picked: list[Unit] = []
        samples = 0
        for unit in sorted(self._trainable(now), key=lambda unit: unit.reports[0].sequence):
            if samples >= self._config.batch_size:
                break
            picked.append(unit)
            if len(unit.reports) == 1 or any(self._compare(unit)):
                samples += sum(1 for _ in unit.samples())
        return picked

    def _compare(self, unit: Unit) -> list[float]:
        """Advantages within a group of at least two reports."""
        compare = leave_one_out if self._config.advantage == "leave-one-out" else group_relative
        return compare([report.score for report in unit.reports], self._config.normalize)

    def _assemble(self, units: list[Unit]) -> _Built:
        scores = [report.score for unit in units for report in unit.reports]
        after = self._baseline.updated(scores, self._config.baseline_decay)
        lone = [unit for unit in units if len(unit.reports) == 1]
        singles = self._baseline.advantages([unit.reports[0].score for unit in lone], after, self._config.normalize)
        advantages = dict(zip(lone, ([single] for single in singles), strict=True))
        samples: list[TrainSample] = []
        consumed: dict[str, Consumption] = {}
        for unit in units:
            values = advantages.get(unit) or self._compare(unit)
            verdict = _verdict(unit, any(values))
            for report, advantage in zip(unit.reports, values, strict=True):
                ids = [report.report_id, *(sample.record_id for sample in report.samples)]
                consumed.update((record_id, Consumption(record_id, *verdict)) for record_id in ids)
                if any(values):
                    samples += [sample.train(advantage) for sample in report.samples]
        metrics = _metrics(units, lone, scores, samples, self._baseline)
        batch = Batch(samples=samples, consumed=[*consumed.values()], metrics=metrics, signal=bool(samples))
        return _Built(batch, units, after)


def _member(report: ReportRecord, parsed: ScoredReport) -> Member:
    return (parsed.choice, *report.references)


def _baseline(algorithm_state: Mapping[str, Any]) -> RunningBaseline:
    if "baseline" not in algorithm_state:
        return RunningBaseline()
    try:
        return RunningBaseline.from_json(algorithm_state["baseline"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the scenario's algorithm state is not of recipe scored: {error!r}") from error


def _stale(release_id: str | None, ages: Mapping[str, int], bound: int) -> str:
    if release_id is None or release_id not in ages:
        return f"too stale: release {release_id} is not in the chain's recent history"
    return f"too stale: {ages[release_id]} publications old, at most {bound}"


def _verdict(unit: Unit, signal: bool) -> tuple[Disposition, str]:
    if signal:
        return Disposition.TRAINED, ""
    if len(unit.reports) == 1:
        return Disposition.NO_SIGNAL, "no signal: the score equals the running baseline"
    return Disposition.NO_SIGNAL, "no signal: all scores of the group are equal"


def _metrics(
    units: list[Unit], lone: list[Unit], scores: list[float], samples: list[TrainSample], before: RunningBaseline
) -> dict[str, float]:
    metrics = {
        "mean_score": math.fsum(scores) / len(scores),
        "min_score": min(scores),
        "max_score": max(scores),
        "reports": float(len(scores)),
        "groups": float(len(units) - len(lone)),
        "singles": float(len(lone)),
        "samples": float(len(samples)),
        "no_signal_samples": float(sum(1 for unit in units for _ in unit.samples()) - len(samples)),
        "output_tokens": float(sum(len(sample.output_ids) for sample in samples)),
    }
    return {**metrics, "baseline": before.mean} if before.weight else metrics
