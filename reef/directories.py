"""Temporary directories that do not pile up when their owners are killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_LOCK = "lock"


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
