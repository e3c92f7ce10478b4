"""Processes of this machine that are no children of ours: who they are, whether they live, how they end.

Linux tells when a process started, so that a process id used again is never taken for its old owner; elsewhere the id
alone has to do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    started: str  # clock ticks after boot; "" where unknown


def identify(pid: int) -> Process | None:
    """The process that has this id now, or None. A zombie has ended."""
    if not _PROC.is_dir():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        return Process(pid, "")
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else Process(pid, fields[19])


def lives(process: Process) -> bool:
    return identify(process.pid) == process


def end(process: Process, seconds: float, patience: float = 0.0) -> bool:
    """Send SIGKILL to what still lives after `patience`; True once it is gone, False if not within `seconds` more."""
    if not gone([process], patience):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return gone([process], seconds)


def gone(processes: Sequence[Process], seconds: float) -> bool:
    """Wait up to `seconds` until none of them lives."""
    deadline = time.monotonic() + seconds
    while any(lives(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def named(word: str, programs: Sequence[str]) -> dict[str, Process]:
    """The process of each of `programs` that has `word` in its command line (Linux only)."""
    lines = {pid: line for pid in _pids() if word in (line := _command_line(pid))}
    found = {program: identify(pid) for pid, line in lines.items() if (program := _program(line)) in programs}
    return {program: process for program, process in found.items() if process is not None}


def family(word: str) -> list[Process]:
    """Every process whose command line contains `word`, except this one, and all their descendants (Linux only)."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for pid in _pids():
        if pid != os.getpid() and word in _command_line(pid):
            found.add(pid)
        if (fields := _stat(pid)) is not None:
            parents[pid] = int(fields[1])
    while grown := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= grown
    return [process for pid in sorted(found) if (process := identify(pid)) is not None]


def _pids() -> Iterator[int]:
    if _PROC.is_dir():
        yield from (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _command_line(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _program(command_line: str) -> str:
    return os.path.basename(command_line.partition("\0")[0])


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third (state) on, proc(5); None when there is no such process."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
