"""Whether an engine's process still runs: its data plane greets whoever connects, whatever else the engine is doing."""

from __future__ import annotations

import socket
import time
from contextlib import suppress


class Pulse:
    """Knocks at one engine's socket, and knocks again once it was greeted. Never blocks."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._knocking: socket.socket | None = None
        self._waiting_since: float | None = None

    def silence(self) -> float:
        """For how long a knock has not been answered (seconds), as of now."""
        if self._knocking is not None and self._answered(self._knocking):
            self._waiting_since = None
        if self._knocking is None:
            self._knock()
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        return time.monotonic() - self._waiting_since

    def close(self) -> None:
        if self._knocking is not None:
            self._knocking.close()
            self._knocking = None

    def _knock(self) -> None:
        knocking = socket.socket(socket.AF_UNIX)
        knocking.setblocking(False)
        try:
            knocking.connect(self._path)
        except OSError:  # nobody listens, or nobody has accepted anything for long
            knocking.close()
        else:
            self._knocking = knocking

    def _answered(self, knocking: socket.socket) -> bool:
        answer = b""
        with suppress(BlockingIOError):
            with suppress(ConnectionError):  # then there is no answer to come
                answer = knocking.recv(1)
            self.close()
        return bool(answer)
