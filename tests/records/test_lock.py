from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reef.errors import ConfigError
from reef.records.lock import DirectoryLock

HOLD = """
import sys, time
from pathlib import Path
from reef.records.lock import DirectoryLock
DirectoryLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_owner_is_refused_by_the_first_ones_pid(tmp_path: Path):
    with DirectoryLock(tmp_path / "data"), pytest.raises(ConfigError, match=f"in use by process {os.getpid()}: stop"):
        DirectoryLock(tmp_path / "data").acquire()
    DirectoryLock(tmp_path / "data").acquire()


def test_the_lock_dies_with_its_owner(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {owner.pid}:"):
            DirectoryLock(tmp_path).acquire()
        owner.send_signal(signal.SIGKILL)
    with DirectoryLock(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_release_may_be_repeated(tmp_path: Path):
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.release()
    lock.release()
