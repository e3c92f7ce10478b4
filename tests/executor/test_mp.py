"""What processes add: death, signals, logs, environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from reef.errors import WorkerDied
from reef.runtime.executor import make_executor
from tests.executor.conftest import alive, gone_soon

COUNTER = "tests.executor.workers:Counter"


@pytest.fixture
def executor():
    executor = make_executor("mp", COUNTER, [{}, {}], name="counter")
    executor.start()
    yield executor
    executor.close()


def test_death_by_signal_names_the_signal(executor):
    pending = executor.rpc(0, "sleep", 600)
    os.kill(executor.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=rf"counter-0 \(pid {executor.pids[0]}\) was ended by signal 9"):
        pending.result(60)
    assert "signal 9" in executor.health()


def test_death_by_exit_quotes_the_last_output(executor):
    with pytest.raises(WorkerDied, match="exited with code 3; its last output:\nlast words"):
        executor.rpc(0, "exit", 3).result(60)


def test_death_in_the_constructor_is_told_with_its_output():
    executor = make_executor("mp", "tests.executor.workers:Dies", [{}], name="dies")
    with pytest.raises(WorkerDied, match="exited with code 7; its last output:\ncannot live"):
        executor.start()


def test_output_goes_to_the_log(tmp_path):
    with pytest.raises(WorkerDied):
        make_executor("mp", COUNTER, [{"broken": True}], name="engine", log_directory=tmp_path / "logs").start()
    assert (tmp_path / "logs" / "engine-0.log").read_text() == "about to break\n"


def test_a_grandchild_that_lives_on_does_not_hide_the_death(executor):
    grandchild = executor.rpc(0, "fork").result(60)
    pending = executor.rpc(0, "sleep", 600)
    os.kill(executor.pids[0], signal.SIGKILL)
    try:
        with pytest.raises(WorkerDied):
            pending.result(60)
    finally:
        os.kill(grandchild, signal.SIGKILL)


OWNER = """
import sys, time
from reef.runtime.executor import make_executor
executor = make_executor("mp", "tests.executor.workers:Counter", [{}, {}])
executor.start()
executor.rpc(0, "sleep", 600)
print(*executor.pids, flush=True)
time.sleep(600)
"""


def test_workers_die_with_an_owner_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
        owner.kill()
    assert gone_soon(pids)


def test_workers_die_with_their_owner_even_without_the_kernels_help():
    blind = OWNER.replace("import sys", "import reef.runtime.executor.mp as mp, sys", 1).replace(
        "executor = ",
        'mp._BOOTSTRAP = mp._BOOTSTRAP.replace("import json, signal, sys;", '
        "\"import json, signal, sys; import ctypes; ctypes.CDLL = lambda name: type('FakeLibc', (), "
        "{'prctl': lambda *a: 0})();\")\nexecutor = ",
        1,
    )
    with subprocess.Popen([sys.executable, "-c", blind], stdout=subprocess.PIPE, text=True) as owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        owner.kill()
    assert gone_soon(pids)
