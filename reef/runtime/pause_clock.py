"""Where the time of a pause goes."""

from __future__ import annotations

import time


class PauseClock:
    """Seconds by phase. The phases of one pause follow one another, so their sum is the pause."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._phases: dict[str, float] = {}
        self.newest: dict[str, float] = {}
        """Of the newest pause that ended; empty before the first."""

    @property
    def running(self) -> bool:
        return self._since is not None

    def start(self) -> None:
        self._since, self._phases = time.monotonic(), {}

    def lap(self, phase: str) -> None:
        """What passed since the lap before was `phase`. Ignored where nothing is paused."""
        if self._since is not None:
            now = time.monotonic()
            self._phases[phase] = self._phases.get(phase, 0.0) + now - self._since
            self._since = now

    def split(self, phase: str, part: str, seconds: float) -> None:
        """Of a phase that is over, `seconds` were `part`."""
        if phase in self._phases:
            seconds = min(seconds, self._phases[phase])
            self._phases = {part: seconds, **self._phases, phase: self._phases[phase] - seconds}

    def stop(self) -> None:
        if self._since is not None:
            self._since, self.newest = None, self._phases

    def cancel(self) -> None:
        """Forget a pause that should not count."""
        self._since = None
