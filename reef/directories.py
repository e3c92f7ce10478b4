"""Where files go, how they get there whole, and temporary directories that do not outlive killed owners for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_LOCK = "lock"


def cache_directory() -> Path:
    """`$REEF_CACHE`, else `$XDG_CACHE_HOME/reef`, else `~/.cache/reef`."""
    if explicit := os.environ.get("REEF_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reef"


def sync_directory(directory: Path) -> None:
    """Make the names in it durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Write the file whole or not at all; if `durable`, return when it is on disk. Raises OSError."""
    scratch = path.with_name(f"{path.name}.partial")
    try:
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        scratch.rename(path)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
        raise
    if durable:
        sync_directory(path.parent)


class OwnedDirectory:
    """A fresh directory (mode 0700) of this process in the system's temporary directory.

    Making one removes those with the same prefix whose owner is gone: an owner holds a lock that ends with it.
    """

    def __init__(self, prefix: str) -> None:
        for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError), old.joinpath(_LOCK).open("r") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (self.path / _LOCK).exists():
                return
            os.close(self._lock)  # somebody took it for a dead owner's before it was locked

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
