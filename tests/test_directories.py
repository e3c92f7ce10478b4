from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys

import pytest

from reef.directories import OwnedDirectory

OWNER = """
import sys, time
from reef.directories import OwnedDirectory
print(OwnedDirectory("mine-").path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_owner_left_is_removed_and_a_living_one_keeps_its_own(temporary):
    environment = {**os.environ, "TMPDIR": str(temporary)}
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    try:
        paths = [owner.stdout.readline().strip() for owner in owners]
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait()
        mine = OwnedDirectory("mine-")
        assert [os.path.exists(path) for path in paths] == [False, True]
        assert stat.S_IMODE(mine.path.stat().st_mode) == 0o700
        mine.remove()
        assert not mine.path.exists() and os.path.exists(paths[1])
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
            owner.stdout.close()


def test_other_names_and_directories_without_a_lock_are_left_alone(temporary):
    for name in ("other-1", "mine-unlocked"):
        (temporary / name).mkdir()
    (temporary / "other-1" / "lock").touch()
    OwnedDirectory("mine-").remove()
    assert sorted(path.name for path in temporary.iterdir()) == ["mine-unlocked", "other-1"]
