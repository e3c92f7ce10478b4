"""The durable marker, and the budget that bounds how often a dead component is replaced."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import deque
from pathlib import Path

import msgspec

from reef.errors import StorageError
from reef.points import Point, crossing
from reef.runtime.interfaces import Marker


class MarkerFile:
    """The coordinator's one durable record: a checksum line, then JSON; replaced whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Marker | None:
        """Return the marker, or None if no job ever ran. Raises StorageError if the file is damaged."""
        try:
            digest, _, body = self._path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise StorageError(
                f"{self._path} is damaged (its checksum does not match). The committed releases are safe in the "
                "database: move the file away and start again; a step that was in flight is then trained again"
            )
        return msgspec.json.decode(body, type=Marker)

    def write(self, marker: Marker) -> None:
        """Return when the marker is on disk."""
        marker.updated_at = time.time()
        body = msgspec.json.encode(marker)
        with crossing(Point[f"MARKER_{marker.state.name}"]):
            self._replace(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)

    def _replace(self, content: bytes) -> None:
        scratch = self._path.with_suffix(".partial")
        try:
            with scratch.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            scratch.rename(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise StorageError(f"the training marker could not be written: {error}") from error


class RestartBudget:
    """At most `limit` replacements in `window` seconds, after 1, 2, 4, ... seconds of waiting."""

    def __init__(self, limit: int = 3, window: float = 300.0) -> None:
        self._limit = limit
        self._window = window
        self._times: deque[float] = deque()

    def take(self) -> float | None:
        """Return how long to wait before this replacement (seconds), or None when the budget is spent."""
        now = time.monotonic()
        while self._times and now - self._times[0] > self._window:
            self._times.popleft()
        if len(self._times) >= self._limit:
            return None
        self._times.append(now)
        return float(2 ** (len(self._times) - 1))

    def give_back(self) -> None:
        """The replacement that was taken last turned out not to be needed."""
        self._times.pop()
