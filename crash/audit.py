"""The invariants of a deployment, asked from outside: over HTTP, and in the bytes that its releases name."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from crash.load import Answer, Ledger
from crash.rescore import Rescorer
from reef.client import ReefClient
from reef.errors import ReefError

RESCORED = 25
"""New answers that one check re-scores, besides all that cross a publication."""
NEWEST = 60
READS = 20
"""Of releases and commits, until no release came between them."""


@dataclass(slots=True)
class Findings:
    """What is broken, by kind. All empty: every invariant holds."""

    lost_receipts: list[str] = field(default_factory=list)
    double_trained: list[str] = field(default_factory=list)
    uncommitted_served: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)  # chain, spans, log-probabilities, answers

    def everything(self) -> list[str]:
        return [*self.lost_receipts, *self.double_trained, *self.uncommitted_served, *self.other]


@dataclass(slots=True)
class Known:
    """What was seen of one scenario; it may be added to, never changed."""

    releases: dict[int, dict[str, Any]] = field(default_factory=dict)  # by number
    commits: dict[int, dict[str, Any]] = field(default_factory=dict)  # by step
    consumed: dict[str, int] = field(default_factory=dict)  # record id -> step
    records: set[str] = field(default_factory=set)
    last_sequence: int = 0

    def by_load(self) -> dict[str, dict[str, Any]]:
        return {release["runtime_load_id"]: release for release in self.releases.values()}


class Audit:
    """Checks what is new since the last check, and that what was there did not change."""

    def __init__(self, client: ReefClient, ledger: Ledger, rescorer: Rescorer, seed: int = 0) -> None:
        self._client = client
        self._ledger = ledger
        self.rescorer = rescorer
        self._luck = random.Random(seed)
        self._known: dict[str, Known] = {}
        self.findings = Findings()

    @property
    def releases(self) -> int:
        return sum(len(known.releases) for known in self._known.values())

    def check(self, scenarios: list[str]) -> None:
        """Everything that acknowledgements and records of before this call can prove."""
        for scenario in scenarios:
            known = self._known.setdefault(scenario, Known())
            owed = self._ledger.receipts(scenario)  # before the records are read: later ones may come meanwhile
            self._check_records(scenario, known, owed)
            self._check_fragments(scenario, known)
        with self._ledger.lock:
            self.findings.lost_receipts += self._ledger.lost
            self.findings.other += self._ledger.surprises
            self._ledger.lost.clear()
            self._ledger.surprises.clear()

    def check_all_receipts(self, scenarios: list[str]) -> None:
        """Read every record again: each acknowledged one is still there."""
        for scenario in scenarios:
            owed = self._ledger.receipts(scenario)
            stored = [record["agent_record_id"] for record in self._records(scenario, 0)]
            if len(stored) != len(set(stored)):
                self.findings.other.append(f"{scenario}: a record is listed twice")
            self.findings.lost_receipts += [f"{scenario}: {receipt}" for receipt in sorted(owed - set(stored))]

    # ------------------------------------------------------------------ the chain

    def _check_chain(self, scenario: str, known: Known) -> None:
        """Linear, append-only, moved by compare-and-swap; the head is the last release."""
        releases, commits = self._chain(scenario, known)
        _extend(known.releases, releases, "number", self._complain(scenario))
        _extend(known.commits, commits, "step", self._complain(scenario))
        numbers = sorted(known.releases)
        self._expect(
            numbers == list(range(len(numbers))),
            f"{scenario}: the chain has gaps: {len(numbers)} releases up to {numbers[-1:]}",
        )
        for number in numbers[1:]:
            parent = known.releases[number - 1]["release_id"]
            self._expect(known.releases[number]["parent_id"] == parent, f"{scenario}: release {number} has two parents")
        steps = sorted(known.commits)
        self._expect(
            steps == list(range(1, len(steps) + 1)), f"{scenario}: steps are missing: {len(steps)} up to {steps[-1:]}"
        )
        self._check_commits(scenario, known)

    def _chain(self, scenario: str, known: Known) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Releases and commits of one moment: read again while a release was published between the reads."""
        for attempt in range(READS):
            before = self._newest(scenario, "releases", known.releases, "number")
            commits = self._newest(scenario, "commits", known.commits, "step")
            after = self._newest(scenario, "releases", known.releases, "number")
            if before == after and after["head"] == after["releases"][0]["release_id"]:
                break
            time.sleep(0.02 * attempt)
        else:
            self.findings.other.append(f"{scenario}: the head is not the newest release")
        return after["releases"], commits["commits"]

    def _check_commits(self, scenario: str, known: Known) -> None:
        committed = {one["release"]: one for one in known.commits.values() if one["release"] is not None}
        by_id = {release["release_id"]: release for release in known.releases.values()}
        self._expect(len(committed) == len(by_id) - 1, f"{scenario}: releases and commits do not match one to one")
        for release_id, commit in committed.items():
            release = by_id.get(release_id)
            swapped = release is not None and commit["expected_head"] == release["parent_id"]
            self._expect(swapped, f"{scenario}: {release_id} was not committed by compare-and-swap on its parent")
        for step, commit in known.commits.items():
            if commit["kind"] == "trained":
                trained = sum(item["disposition"] == "trained" for item in commit["consumed"])
                used = commit["metrics"]["reports"] + commit["metrics"]["samples"]
                self._expect(trained == used, f"{scenario}: step {step} trained on {used:g} and consumed {trained}")
            for item in commit["consumed"]:
                earlier = known.consumed.setdefault(item["record_id"], step)
                if earlier != step:
                    self.findings.double_trained.append(
                        f"{scenario}: {item['record_id']} in steps {earlier} and {step}"
                    )

    # ------------------------------------------------------------------ records

    def _check_records(self, scenario: str, known: Known, owed: set[str]) -> None:
        fresh = list(self._records(scenario, known.last_sequence, detail="full"))
        self._check_chain(scenario, known)  # after the records: whatever their spans name is committed by now
        for record in fresh:
            if record["agent_record_id"] in known.records:
                self.findings.other.append(f"{scenario}: {record['agent_record_id']} is listed twice")
            known.records.add(record["agent_record_id"])
            known.last_sequence = record["sequence"]
        self.findings.lost_receipts += [f"{scenario}: {receipt}" for receipt in sorted(owed - known.records)]
        inference = [record for record in fresh if record["kind"] == "inference"]
        for record in inference:
            self._check_answer(scenario, record, known)
        for record in (record for record in fresh if record["kind"] == "report"):
            self._check_report(record)
        self._rescore(scenario, inference, known)

    def _check_answer(self, scenario: str, record: dict[str, Any], known: Known) -> None:
        receipt, by_load = record["agent_record_id"], known.by_load()
        with self._ledger.lock:
            answer = self._ledger.answers.get(receipt)
        if answer is not None:
            self._check_bytes(answer, record)
        for generation in record["generations"]:
            spans = generation["spans"]
            edges = [0, *(span["end"] for span in spans)]
            covered = [span["start"] for span in spans] == edges[:-1] and edges[-1] == len(generation["output_ids"])
            self._expect(covered, f"{receipt}: spans do not cover the output: {spans}")
            for span in spans:
                release = by_load.get(span["runtime_load_id"])
                if release is None:
                    self.findings.uncommitted_served.append(f"{scenario}: {receipt}: {span} names no release")
                elif answer is not None and answer.finished_at < release["created_at"]:
                    self.findings.uncommitted_served.append(f"{scenario}: {receipt}: {span} before its release")

    def _check_bytes(self, answer: Answer, record: dict[str, Any]) -> None:
        stored, received = record["response"], answer.received.decode(errors="replace")
        same = stored == received if answer.whole else stored.startswith(received)
        self._expect(same, f"{answer.receipt}: the client saw other bytes than were recorded")

    def _check_report(self, record: dict[str, Any]) -> None:
        with self._ledger.lock:
            report = self._ledger.reports.get(record["agent_record_id"])
        if report is not None:
            same = record["references"] == [report.receipt] and record["score"] == report.score
            self._expect(same, f"{report.record_id}: another report is stored than was acknowledged")

    def _rescore(self, scenario: str, records: list[dict[str, Any]], known: Known) -> None:
        by_load = known.by_load()
        generations = [
            (record["agent_record_id"], generation)
            for record in records
            for generation in record["generations"]
            if generation["output_ids"] and all(span["runtime_load_id"] in by_load for span in generation["spans"])
        ]
        mixed = [entry for entry in generations if len(entry[1]["spans"]) > 1]
        plain = [entry for entry in generations if len(entry[1]["spans"]) == 1]
        for receipt, generation in mixed + self._luck.sample(plain, min(RESCORED, len(plain))):
            if (wrong := self.rescorer.generation(generation, by_load)) is not None:
                self.findings.other.append(f"{scenario}: {receipt}: {wrong}")

    def _check_fragments(self, scenario: str, known: Known) -> None:
        """What clients saw of streams that a death cut short comes from releases that were committed by then."""
        with self._ledger.lock:
            mine = [one for one in self._ledger.fragments if one.scenario == scenario]
            self._ledger.fragments = [one for one in self._ledger.fragments if one.scenario != scenario]
        for one in mine:
            served = [known.releases[number] for number in sorted(known.releases)]
            served = [release for release in served if release["created_at"] <= one.finished_at]
            earlier = sum(release["created_at"] <= one.started_at for release in served)
            # The last of the earlier ones served then, or its predecessor: it may still have been committed.
            if (wrong := self.rescorer.fragment(one.question, one.tokens, served[max(0, earlier - 2) :])) is not None:
                self.findings.uncommitted_served.append(f"{scenario}: a stream without a receipt: {wrong}: {one}")

    # ------------------------------------------------------------------ plumbing

    def _records(self, scenario: str, after: int, **query: object) -> Iterator[dict[str, Any]]:
        while True:
            page = self._client.get(f"/reef/scenarios/{scenario}/records", {"after": after, "limit": 200, **query})
            yield from page["records"]
            if page["next_after"] is None:
                return
            after = page["next_after"]

    def _newest(self, scenario: str, what: str, known: dict[int, Any], key: str) -> dict[str, Any]:
        """As many of the newest as reach back to what is known; all, the first time."""
        for limit in (NEWEST, 1000):
            shown: dict[str, Any] = self._client.get(f"/reef/scenarios/{scenario}/{what}", {"limit": limit})
            if len(shown[what]) < limit or any(entry[key] in known for entry in shown[what]):
                return shown
        raise ReefError(f"{scenario}: more than 1000 new {what} since the last check")

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.findings.other.append(otherwise)

    def _complain(self, scenario: str) -> Callable[[str], None]:
        return lambda complaint: self.findings.other.append(f"{scenario}: {complaint}")


def _extend(
    known: dict[int, dict[str, Any]], newest: list[dict[str, Any]], key: str, complain: Callable[[str], None]
) -> None:
    """Add what is new; what was known must be unchanged, and nothing of it may be gone."""
    for entry in newest:
        before = known.setdefault(entry[key], entry)
        if before != entry:
            complain(f"{key} {entry[key]} changed from {before} to {entry}")
    shown = {entry[key] for entry in newest}
    gone = [number for number in known if shown and number >= min(shown) and number not in shown]
    if gone:
        complain(f"{key} {gone} are gone")
