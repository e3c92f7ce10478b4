"""The durable marker; and supervision: what dies is replaced, but not for ever."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import msgspec

from reef.directories import replace_file
from reef.errors import ReefError, StorageError
from reef.points import Point, crossing
from reef.runtime.interfaces import Marker

log = logging.getLogger("reef.recovery")

POLL_SECONDS = 0.5
CLOSE_SECONDS = 5.0


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
            try:
                replace_file(self._path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body, durable=True)
            except OSError as error:
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


@dataclass(slots=True)
class Watched:
    """One component. `repair` replaces it, or returns False if that turned out not to be needed."""

    name: str
    trouble: Callable[[], str | None]  # why it must be replaced; None: it need not
    repair: Callable[[], bool]
    budget: RestartBudget = field(default_factory=RestartBudget)


class Supervisor:
    """Watches components on a thread of its own and replaces what is in trouble, each within its budget."""

    def __init__(self, *watched: Watched) -> None:
        self._watched = watched
        self._nudged = Event()
        self._closing = Event()
        self._thread = Thread(target=self._run, name="supervisor", daemon=True)
        self.replaced: dict[str, int] = {}  # component -> how often
        self.stopped: dict[str, str] = {}  # component -> why it is not replaced any more
        self.repairing: dict[str, str] = {}  # component -> why it is being replaced

    def start(self) -> None:
        """Begin to watch; calling it again changes nothing."""
        if self._thread.ident is None and not self._closing.is_set():
            self._thread.start()

    def nudge(self) -> None:
        self._nudged.set()

    def close(self) -> None:
        """Replace nothing any more; a repair that runs is waited for, but not for long."""
        self._closing.set()
        self._nudged.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._nudged.wait(POLL_SECONDS)
            self._nudged.clear()
            for one in self._watched:
                if one.name not in self.stopped and not self._closing.is_set() and (reason := one.trouble()):
                    self._replace(one, reason)

    def _replace(self, one: Watched, reason: str) -> None:
        delay = one.budget.take()
        if delay is None:
            self.stopped[one.name] = f"the {one.name} died too often to be replaced again; last reason: {reason}"
            log.error(self.stopped[one.name])
            return
        self.repairing[one.name] = f"recoverable: the {one.name} is being replaced: {reason}"
        log.warning("%s (in %.0f s)", self.repairing[one.name], delay)
        try:
            if self._closing.wait(delay):
                return
            if one.repair():
                self.replaced[one.name] = self.replaced.get(one.name, 0) + 1
                log.warning("the %s was replaced", one.name)
            else:
                one.budget.give_back()
        except ReefError as error:
            log.warning("replacing the %s failed: %s", one.name, error)
        except Exception:  # the supervisor must outlive any failed repair: it tries again within its budget
            log.exception("replacing the %s failed", one.name)
        finally:
            del self.repairing[one.name]
