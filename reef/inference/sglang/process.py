"""A process of an engine or a router as its owner sees it: started under a lease, logged to a file, ended for sure."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from reef.errors import EngineError, ReefError, WorkerDied

_LEASE = Path(__file__).with_name("lease.py")
_TAIL_BYTES = 2000
_POLL_SECONDS = 0.1


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LeasedProcess:
    """A command that lives at most as long as this process, with everything that it starts."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log_path: Path | None
    ) -> None:
        self.name = name
        self._log_path = log_path
        log: IO[bytes] = tempfile.TemporaryFile() if log_path is None else log_path.open("ab+")  # noqa: SIM115
        log.seek(0, os.SEEK_END)
        self._log, self._offset = log, log.tell()
        theirs, self._lease = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_LEASE), str(theirs), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=[theirs],
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lease)
            log.close()
            raise
        finally:
            os.close(theirs)

    def death(self) -> str | None:
        """Why it is gone, with the end of its log; None while it lives."""
        code = self._process.poll()
        if code is None:
            return None
        where = f" ({self._log_path})" if self._log_path else ""
        return f"{self.name} exited with code {code}{where}{self._tail()}"

    def printed(self, text: str) -> bool:
        """Whether its output has this, in small letters or large."""
        self._log.seek(self._offset)
        return text.encode() in self._log.read().lower()

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Raises WorkerDied if it ends first, EngineError after `seconds`."""
        deadline = time.monotonic() + seconds
        while not ready():
            if (reason := self.death()) is not None:
                raise WorkerDied(reason)
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name} was not ready within {seconds:g} s{self._tail()}")
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Ask the lease to end everything; returns at once."""
        if self._lease >= 0:
            os.close(self._lease)
            self._lease = -1

    def stop(self, seconds: float = 20.0) -> None:
        """Return when every process of it is gone. Raises ReefError if that took too long."""
        self.release()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise ReefError(f"{self.name} (pid {self._process.pid}) is not gone after {seconds:g} s") from error
        finally:
            with contextlib.suppress(OSError, ValueError):
                self._log.close()

    def _tail(self) -> str:
        try:
            end = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(self._offset, end - _TAIL_BYTES))
            text = self._log.read().decode(errors="replace").strip()
        except (OSError, ValueError):  # closed
            return ""
        return f"; the end of its output:\n{text}" if text else ""
