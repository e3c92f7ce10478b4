from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reef.errors import EngineError, WorkerDied
from reef.inference.sglang.process import LeasedProcess

ENGINE = "import os, sys, time; os.write(1, b'child %d\\n' % os.fork()); time.sleep(900)"
"""Forks, so that two processes live, and prints the child's id; the child prints 0."""

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(900)"
)


def start(code: str, log: Path) -> LeasedProcess:
    return LeasedProcess("engine-0", [sys.executable, "-c", code], os.environ, log)


def printed(log: Path, text: str) -> str:
    deadline = time.monotonic() + 600
    while text not in (content := log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, content
        time.sleep(0.02)
    return content


def children(log: Path) -> list[int]:
    """What a fork returned in the parent, once both have printed."""
    while len(lines := [line for line in printed(log, "child").splitlines(True) if line.endswith("\n")]) < 2:
        time.sleep(0.02)
    return [pid for line in lines if (pid := int(line.split()[1]))]


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
            return True
        time.sleep(0.02)
    return False


def test_stop_ends_the_process_and_its_children(tmp_path) -> None:
    process = start(ENGINE, tmp_path / "log")
    pids = children(tmp_path / "log")
    assert process.death() is None and pids
    process.stop()
    assert all(gone(pid) for pid in pids)


def test_stop_kills_what_ignores_the_request(tmp_path) -> None:
    process = start(STUBBORN, tmp_path / "log")
    printed(tmp_path / "log", "ready")
    process.stop()
    assert process.death() is not None


def test_owner_that_is_killed_takes_everything_along(tmp_path) -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys, time\nfrom pathlib import Path\nfrom reef.inference.sglang.process import LeasedProcess\n"
            f"LeasedProcess('e', [sys.executable, '-c', {ENGINE!r}], os.environ, Path(sys.argv[1]))\ntime.sleep(900)",
            str(tmp_path / "log"),
        ],
        start_new_session=True,
    )
    pids = children(tmp_path / "log")
    assert pids
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert all(gone(pid) for pid in pids)


def test_death_tells_the_code_and_the_end_of_the_log(tmp_path) -> None:
    process = start("print('no memory'); raise SystemExit(7)", tmp_path / "log")
    with pytest.raises(WorkerDied, match=r"engine-0 exited with code 7 \(.*log\); the end of its output:\nno memory"):
        process.wait_until(lambda: False, 200)
    process.stop()


def test_waiting_is_bounded(tmp_path) -> None:
    process = start("import time; time.sleep(900)", tmp_path / "log")
    with pytest.raises(EngineError, match=r"engine-0 was not ready within 0\.3 s"):
        process.wait_until(lambda: False, 0.3)
    process.stop()
