"""What a person reads while it runs, what is kept of every session, and the report at the end."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from crash.kills import DISK

SESSION = "session.json"


class Outcome(msgspec.Struct):
    """One kill. `seconds` from the death to the first answers after it; of a trainer, to the next release."""

    kind: str
    name: str
    point: str
    victim: str
    seconds: float | None = None
    health_seconds: float | None = None
    problems: list[str] = []


class Session(msgspec.Struct, kw_only=True):
    """One deployment through some kills, or one of the other misfortunes; kept in a file of its own."""

    kind: str
    outcomes: list[Outcome] = []
    lost_receipts: int = 0
    double_trained: int = 0
    uncommitted_served: int = 0
    other: list[str] = []  # of the chain, spans, log-probabilities, answers, the end
    answers: int = 0
    reports: int = 0
    releases: int = 0
    rescored_answers: int = 0
    rescored_across_publications: int = 0
    rescored_cut_streams: int = 0
    rescored_ill_conditioned: int = 0
    worst_difference_nats: float = 0.0
    misfortunes: dict[str, list[str]] = {}  # name -> problems
    seconds: float = 0.0

    def write(self, directory: Path) -> None:
        scratch = directory / f"{SESSION}.partial"
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        scratch.rename(directory / SESSION)


def read_sessions(directory: Path) -> list[Session]:
    files = sorted(directory.glob(f"*/{SESSION}"))
    return [msgspec.json.decode(file.read_bytes(), type=Session) for file in files]


def line(outcome: Outcome, session: Session, number: int, total: int) -> str:
    """One kill, on one line; its problems below it."""
    seconds = "     -" if outcome.seconds is None else f"{outcome.seconds:5.1f}s"
    verdict = "ok" if not outcome.problems else "BROKEN"
    text = (
        f"[{number:3}/{total}] {outcome.kind:18} {outcome.victim:7} {outcome.name:58} "
        f"serves after {seconds}  {session.answers:5} answers {session.reports:5} reports  {verdict}"
    )
    return "\n".join([text, *(f"    {problem}" for problem in outcome.problems)])


def summary(sessions: Sequence[Session]) -> dict[str, Any]:
    """The numbers of `.reef/crash/report.json`."""
    everything = [outcome for session in sessions for outcome in session.outcomes]
    outcomes = [outcome for outcome in everything if outcome.victim != DISK]
    full = [outcome for outcome in everything if outcome.victim == DISK]
    counts = {
        "lost_receipts": sum(session.lost_receipts for session in sessions),
        "double_trained": sum(session.double_trained for session in sessions),
        "uncommitted_served": sum(session.uncommitted_served for session in sessions),
        "unrecovered": sum(outcome.seconds is None for outcome in everything),
    }
    other = [problem for session in sessions for problem in session.other]
    misfortunes = {name: problems for session in sessions for name, problems in session.misfortunes.items()}
    return {
        "kills": len(outcomes),
        "points": len({outcome.point for outcome in outcomes if outcome.point}),
        **counts,
        "full_disks": len(full),
        "other": other,
        "misfortunes": misfortunes,
        "passed": bool(everything or misfortunes) and not any([*counts.values(), other, *misfortunes.values()]),
        "kills_of_kind": _counted(outcome.kind for outcome in outcomes),
        "kills_of_victim": _counted(outcome.victim for outcome in outcomes),
        "acknowledged_answers": sum(session.answers for session in sessions),
        "acknowledged_reports": sum(session.reports for session in sessions),
        "releases": sum(session.releases for session in sessions),
        "rescored_answers": sum(session.rescored_answers for session in sessions),
        "rescored_across_publications": sum(session.rescored_across_publications for session in sessions),
        "rescored_cut_streams": sum(session.rescored_cut_streams for session in sessions),
        "rescored_ill_conditioned": sum(session.rescored_ill_conditioned for session in sessions),
        "worst_difference_nats": max((session.worst_difference_nats for session in sessions), default=0.0),
        "median_seconds_to_healthy": _medians(everything, "health_seconds"),
        "median_seconds_to_serve": _medians(everything, "seconds"),
        "seconds": round(sum(session.seconds for session in sessions), 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }


def write(sessions: Sequence[Session], path: Path) -> bool:
    """Write the file, print all but the single kills; True if everything held."""
    shown = summary(sessions)
    outcomes = [msgspec.to_builtins(outcome) for session in sessions for outcome in session.outcomes]
    path.write_text(json.dumps({**shown, "outcomes": outcomes}, indent=1) + "\n")
    print(json.dumps(shown, indent=1))
    return bool(shown["passed"])


def _counted(names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return found


def _medians(outcomes: Iterable[Outcome], name: str) -> dict[str, float]:
    """Per executor (in the kind's name) and component that died."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        if (value := getattr(outcome, name)) is not None:
            executor = "ray" if "ray" in outcome.kind.split("-") else "mp"
            found.setdefault(f"{outcome.victim} ({executor})", []).append(value)
    return {victim: round(statistics.median(values), 2) for victim, values in sorted(found.items())}
