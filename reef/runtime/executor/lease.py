"""Ends what outlives its owner: `python -m reef.runtime.executor.lease`, with the owner at the other end of its stdin.

The owner writes a line NAME=VALUE and keeps the pipe open; processes that inherited this environment variable get a
SIGKILL once the pipe closes, as it does however the owner ends. For programs that notice the death of their parent late
or not at all: two of Ray's agents take a minute.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from reef.runtime.executor import process

_KILL_SECONDS = 30.0
_POLL_SECONDS = 0.02


class Lease:
    """The owner's end. What starts while it is held must have `mark` ("NAME=VALUE") in its environment."""

    def __init__(self, mark: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # a signal to the owner's group is not for it
        )
        assert self._process.stdin is not None
        self._process.stdin.write(f"{mark}\n".encode())
        self._process.stdin.flush()

    def end(self) -> bool:
        """Kill whatever is left; False if something survives."""
        self._process.communicate()
        return self._process.returncode == 0


def main() -> int:
    """0 once nobody with the mark lives any more, 1 if somebody does after 30 s."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mark = sys.stdin.readline().rstrip("\n")
    sys.stdin.read()
    deadline = time.monotonic() + _KILL_SECONDS
    while mark and (left := process.marked(mark)):  # again: one that was just being started has to be found, too
        for one in left:
            process.end(one, 0.0)
        if time.monotonic() > deadline:
            return 1
        time.sleep(_POLL_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
