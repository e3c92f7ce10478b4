"""One service, and one coordinator, per data directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from reef.errors import ConfigError

LOCK_NAME = "lock"


class DirectoryLock:
    """An exclusive `flock` on a file in `directory` that holds the owner's pid; it dies with its owner.

    A child forked without exec shares the lock and keeps it alive; spawned ones do not.
    """

    def __init__(self, directory: Path, name: str = LOCK_NAME) -> None:
        self._path = directory / name
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Raises ConfigError naming the owner's pid when another process holds the directory."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise ConfigError(
                f"{self._path.parent} is in use by process {owner}: stop it, or choose another data directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the directory up; the file stays, because removing it would race with the next owner."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> DirectoryLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
