"""What a person reads while it runs, and the report at the end."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crash.run import Outcome, Run


def line(outcome: Outcome, run: Run, number: int, total: int) -> str:
    """One kill, on one line; its problems below it."""
    seconds = "     -" if outcome.seconds is None else f"{outcome.seconds:5.1f}s"
    verdict = "ok" if not outcome.problems else "BROKEN"
    ledger = run.load.ledger
    text = (
        f"[{number:3}/{total}] {outcome.kind:13} {outcome.victim:7} dies at {outcome.name:52} "
        f"serves after {seconds}  {len(ledger.answers):5} answers {len(ledger.reports):5} reports  {verdict}"
    )
    return "\n".join([text, *(f"    {problem}" for problem in outcome.problems)])


def summary(runs: list[Run], seconds: float) -> dict[str, Any]:
    """The numbers of `.reef/crash/report.json`."""
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    findings = [run.audit.findings for run in runs]
    unrecovered = [outcome for outcome in outcomes if outcome.seconds is None]
    counts = {
        "lost_receipts": sum(len(found.lost_receipts) for found in findings),
        "double_trained": sum(len(found.double_trained) for found in findings),
        "uncommitted_served": sum(len(found.uncommitted_served) for found in findings),
        "unrecovered": len(unrecovered),
    }
    other = [problem for found in findings for problem in found.other]
    return {
        "kills": len(outcomes),
        "points": len({outcome.name for outcome in outcomes}),
        **counts,
        "other": other,
        "passed": bool(outcomes) and not any(counts.values()) and not other,
        "acknowledged_answers": sum(len(run.load.ledger.answers) for run in runs),
        "acknowledged_reports": sum(len(run.load.ledger.reports) for run in runs),
        "releases": sum(run.audit.releases for run in runs),
        "rescored_answers": sum(run.rescorer.answers for run in runs),
        "rescored_across_publications": sum(run.rescorer.mixed for run in runs),
        "rescored_cut_streams": sum(run.rescorer.fragments for run in runs),
        "worst_difference_nats": max((run.rescorer.worst for run in runs), default=0.0),
        "median_seconds_to_healthy": _medians(outcomes, "health_seconds"),
        "median_seconds_to_serve": _medians(outcomes, "seconds"),
        "seconds": round(seconds, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def write(report: dict[str, Any], path: Path) -> None:
    """Write the file, and print all but the single kills."""
    path.write_text(json.dumps(report, indent=1) + "\n")
    shown = {key: value for key, value in report.items() if key != "outcomes"}
    print(json.dumps(shown, indent=1))


def _medians(outcomes: Iterable[Outcome], name: str) -> dict[str, float]:
    """Per component that died."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        if (value := getattr(outcome, name)) is not None:
            found.setdefault(outcome.victim, []).append(value)
    return {victim: round(statistics.median(values), 2) for victim, values in sorted(found.items())}
