"""`reef serve` as a process of its own, as a user would start it: started, watched, stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from reef.client import ReefClient
from reef.errors import ReefError, Unavailable, WorkerDied

READY = re.compile(r"^reef: ready at (\S+?),", re.MULTILINE)
TAIL_LINES = 25
TERMINATE_SECONDS = 25.0
"""What a stopping server gets before it is killed with its workers."""


class Server:
    """One `reef serve`, or another `command`, with these arguments; its output goes to `log`."""

    def __init__(self, arguments: Sequence[str], log: Path, command: str = "serve") -> None:
        self._arguments, self._log = [command, *arguments], log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # The deployment is what the arguments say: no reef.yaml of this directory, no REEF_SECTION__KEY variables.
        environment = {name: value for name, value in os.environ.items() if not _configures_reef(name)}
        source = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environment.get("PYTHONPATH")]))
        environment["HF_HUB_OFFLINE"] = "1"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as output, _interrupted_afterwards():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "reef.cli", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._log.parent,
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C reaches the demo, and the demo stops the server
            )

    def starting(self, timeout: float) -> Iterator[str]:
        """Yield the reason why it cannot serve yet, several times a second, until it can.

        Raises WorkerDied with the log's tail when it ended, Unavailable after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        reason = "starting"
        while time.monotonic() < deadline:
            self.check()
            found = READY.search(self._text())
            if found is not None:
                try:
                    ReefClient(found[1], timeout=5.0).get("/healthz")
                except ReefError as error:
                    reason = str(error)
                else:
                    self.url = found[1]
                    return
            yield reason
            time.sleep(0.1)
        raise Unavailable(f"reef serve was not ready within {timeout:.0f} s ({reason})\n{self.tail()}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raises WorkerDied, with the end of the log, if the process is gone."""
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise WorkerDied(f"reef serve ended with exit code {code}; the end of {self._log}:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self._text().splitlines()[-TAIL_LINES:])

    def stop(self) -> None:
        """Ask it to end; kill what is left of it and its workers."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(TERMINATE_SECONDS)
        finally:  # also when a second Ctrl-C cuts the waiting short
            with suppress(ProcessLookupError):  # the normal case: nobody is left in its process group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _text(self) -> str:
        return self._log.read_text(errors="replace")


@contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM: a process that was born while one arrived must be known to who has to stop it."""
    if threading.current_thread() is not threading.main_thread():  # where Python delivers no signal
        yield
        return
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda number, _: arrived.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
        for one in arrived:
            signal.raise_signal(one)


def _configures_reef(name: str) -> bool:
    return name.startswith("REEF_") and "__" in name
