"""Keeps an engine's processes no longer than their owner: `python lease.py FD COMMAND...`.

    Reef ──(pipe)──► lease ──► the engine, in a session of its own with all its children

The owner's end of the pipe closes when the owner says so or dies in any way. Then the engine's process group gets
SIGTERM, after a grace SIGKILL, and the lease leaves when nobody of the group is left. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_SECONDS = 3.0
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _end_group(group: int) -> None:
    """Terminate, then kill, and reap every process of the group; the engine's orphans are this process's children."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                os.killpg(group, 0)
            except (ChildProcessError, ProcessLookupError):
                break
            time.sleep(_POLL_SECONDS)


def main(pipe: int, command: list[str]) -> int:
    """Run `command` until it ends or the pipe does; return its exit code as a shell would."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is the owner's to decide on
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # This process has one thread, so the parent-death signal means its own death and nothing else.
    engine = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        restore_signals=True,
    )
    while engine.poll() is None:
        if select.select([pipe], [], [], _POLL_SECONDS)[0]:
            break
    code = engine.returncode
    _end_group(engine.pid)
    if code is None:
        return 0
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
