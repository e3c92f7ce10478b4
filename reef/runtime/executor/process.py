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


def marked(mark: str) -> list[Process]:
    """Every process, except this one, that was started with `mark` ("NAME=VALUE") in its environment (Linux only)."""
    wanted, found = mark.encode(), []
    for pid in _pids():
        if pid != os.getpid() and wanted in _read(pid, "environ").split(b"\0") and (process := identify(pid)):
            found.append(process)
    return found


def named(mark: str, programs: Sequence[str]) -> dict[str, Process]:
    """Those of `marked` that run one of these programs, by program."""
    running = {os.path.basename(_read(one.pid, "cmdline").split(b"\0")[0]).decode(): one for one in marked(mark)}
    return {program: one for program, one in running.items() if program in programs}


def _pids() -> Iterator[int]:
    if _PROC.is_dir():
        yield from (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _read(pid: int, file: str) -> bytes:
    """Empty when the process has ended, or is somebody else's."""
    try:
        return (_PROC / str(pid) / file).read_bytes()
    except OSError:
        return b""


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third (state) on, proc(5); None when there is no such process."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
