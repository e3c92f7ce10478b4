"""A deployment whose data directory is a small file system of its own, which can be filled and freed from outside."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from crash.deployment import Deployment, Unrecovered

MOUNT = ("unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"')
CHUNK = 4096


def can_mount(directory: Path) -> bool:
    """True where an ordinary user may mount a tmpfs in a namespace of their own."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run([*MOUNT, "1m", directory, "true"], capture_output=True, timeout=30).returncode == 0
    return False


class SmallDisk(Deployment):
    """Its data exist as long as the service runs."""

    def __init__(self, directory: Path, flags: Mapping[str, object], size: str = "256m") -> None:
        directory = directory.resolve()  # through /proc/<pid>/root, an absolute link would lead to our own disk
        data = directory / "data"
        data.mkdir(parents=True)
        super().__init__(directory, flags, wrapper=[*MOUNT, size, str(data)])

    @property
    def seen(self) -> Path:
        return Path(f"/proc/{self.pid}/root{self.data}")

    def fill(self, leave: int = 0) -> None:
        """Take all space but `leave` bytes. Raises Unrecovered where the space would not be the deployment's own."""
        if not self.seen.is_dir() or self.seen.stat().st_dev == self.data.stat().st_dev:
            raise Unrecovered(f"{self.seen} is not on the small disk")
        with (self.seen / "ballast").open("ab", buffering=0) as ballast:
            with suppress(OSError):  # ENOSPC
                while True:
                    ballast.write(b"x" * CHUNK)
            ballast.truncate(max(0, ballast.tell() - leave))

    def free(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.seen / "ballast")


class Flicker(threading.Thread):
    """Fills the disk again and again for moments, leaving a little, so that any kind of write meets its end."""

    def __init__(self, deployment: SmallDisk, seed: int = 0) -> None:
        super().__init__(daemon=True)
        self._deployment = deployment
        self._luck = random.Random(seed)
        self._ended = threading.Event()  # Thread has a `_stop` of its own
        self.times = 0

    def run(self) -> None:
        while not self._ended.is_set():
            time.sleep(self._luck.uniform(0.0, 0.6))
            self._deployment.fill(self._luck.choice((0, CHUNK, 8 * CHUNK, 64 * CHUNK)))
            self.times += 1
            time.sleep(self._luck.uniform(0.05, 0.6))
            self._deployment.free()

    def stop(self) -> None:
        self._ended.set()
        self.join(30.0)
