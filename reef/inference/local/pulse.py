"""Whether an engine's process still runs: its data plane greets whoever connects, whatever else the engine is doing."""

from __future__ import annotations

import errno
import socket
import time
from contextlib import suppress

from reef.inference.local.address import Address
from reef.inference.local.protocol import Greet, encode


class Pulse:
    """Knocks at one engine's endpoint, and knocks again once it was greeted. Never blocks."""

    def __init__(self, endpoint: str) -> None:
        self._address = Address.parse(endpoint)
        self._knocking: socket.socket | None = None
        self._unsent = b""  # of our greeting: over TCP a guest says who it is first
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
        where = self._address
        family = socket.AF_UNIX if where.path else socket.AF_INET6 if ":" in where.host else socket.AF_INET
        knocking = socket.socket(family)
        knocking.setblocking(False)
        found = knocking.connect_ex(where.path or (where.host, where.port))
        if found not in (0, errno.EINPROGRESS):  # nobody listens, or nobody has accepted anything for long
            knocking.close()
            return
        self._knocking = knocking
        self._unsent = bytes(encode(Greet(where.token))) if where.token else b""

    def _answered(self, knocking: socket.socket) -> bool:
        answer = b""
        with suppress(BlockingIOError):
            with suppress(OSError):  # then there is no answer to come
                if self._unsent:
                    self._unsent = self._unsent[knocking.send(self._unsent) :]
                answer = knocking.recv(1)
            self.close()
        return bool(answer)
