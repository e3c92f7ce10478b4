"""What processes add: death, signals, logs, environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from reef.errors import ReefError, WorkerDied
from reef.runtime.executor import make_executor

COUNTER = "tests.executor.workers:Counter"


@pytest.fixture
def executor():
    executor = make_executor("mp", COUNTER, [{}, {}], name="counter")
    executor.start()
    yield executor
    executor.close()


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def test_death_by_signal_fails_everything_pending(executor):
    pending = [executor.rpc(0, "sleep", 30), executor.rpc(0, "add")]
    os.kill(executor.pids[0], signal.SIGKILL)
    for future in pending:
        with pytest.raises(WorkerDied, match=rf"counter-0 \(pid {executor.pids[0]}\) was ended by signal 9"):
            future.result(5)
    with pytest.raises(WorkerDied):
        executor.rpc(0, "add").result(0)
    assert "signal 9" in executor.health()
    assert executor.rpc(1, "add").result(5) == 1


def test_death_by_exit_quotes_the_last_output(executor):
    with pytest.raises(WorkerDied, match="exited with code 3; its last output:\nlast words"):
        executor.rpc(0, "exit", 3).result(5)


def test_listeners_hear_once_of_a_death_and_never_of_a_close():
    heard, late = [], []
    executor = make_executor("mp", COUNTER, [{}, {}], name="counter")
    executor.on_failure(heard.append)
    executor.start()
    for pid in executor.pids:
        os.kill(pid, signal.SIGKILL)
    with suppress(WorkerDied):
        executor.rpc(0, "sleep", 30).result(5)
    assert gone_within(executor.pids, 5)
    executor.close()
    executor.on_failure(late.append)
    assert len(heard) == len(late) == 1
    quiet = make_executor("mp", COUNTER, [{}], name="quiet")
    quiet.on_failure(heard.append)
    quiet.start()
    quiet.close()
    assert len(heard) == 1 and quiet.health() is not None


def test_death_in_the_constructor_is_told_with_its_output():
    executor = make_executor("mp", "tests.executor.workers:Dies", [{}], name="dies")
    with pytest.raises(WorkerDied, match="exited with code 7; its last output:\ncannot live"):
        executor.start()


def test_a_foreign_exception_arrives_as_text_with_its_traceback(executor):
    with pytest.raises(ReefError, match=r"^Foreign: from afar") as caught:
        executor.rpc(0, "foreign").result(5)
    assert type(caught.value) is ReefError
    assert "workers.py" in caught.value.__notes__[0]


def test_what_cannot_be_pickled_fails_its_call_only(executor):
    with pytest.raises(TypeError, match="pickle"):
        executor.rpc(0, "unpicklable").result(5)
    with pytest.raises(TypeError, match="pickle"):
        executor.rpc(0, "add", threading.Lock()).result(5)
    assert executor.rpc(0, "add").result(5) == 1


def test_calls_run_on_the_main_thread_and_the_environment_is_per_worker():
    env = [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "3"}]
    executor = make_executor("mp", COUNTER, [{}, {}], env_per_rank=env)
    executor.start()
    assert executor.rpc(0, "where").result(5) == (executor.pids[0], "MainThread")
    assert [f.result(5) for f in executor.collective_rpc("environment", "OMP_NUM_THREADS")] == ["1", "3"]
    executor.close()


def test_workers_ignore_the_interrupt_of_a_terminal(executor):
    for pid in executor.pids:
        os.kill(pid, signal.SIGINT)
    assert [f.result(5) for f in executor.collective_rpc("add")] == [1, 1]


def test_output_goes_to_the_log(tmp_path):
    with pytest.raises(WorkerDied):
        make_executor("mp", COUNTER, [{"broken": True}], name="engine", log_directory=tmp_path / "logs").start()
    assert (tmp_path / "logs" / "engine-0.log").read_text() == "about to break\n"


def test_close_ends_a_process_that_refuses():
    executor = make_executor("mp", "tests.executor.workers:Stubborn", [{}])
    executor.start()
    began = time.monotonic()
    executor.close(timeout=0.3)
    assert not alive(executor.pids[0])
    assert time.monotonic() - began < 10


def test_a_grandchild_that_lives_on_does_not_hide_the_death(executor):
    grandchild = executor.rpc(0, "fork").result(5)
    pending = executor.rpc(0, "sleep", 30)
    os.kill(executor.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        pending.result(5)
    os.kill(grandchild, signal.SIGKILL)


def test_a_large_argument_does_not_wait_for_a_busy_worker(executor):
    executor.rpc(0, "sleep", 1.0)
    began = time.monotonic()
    future = executor.rpc(0, "environment", "x" * 5_000_000)
    assert time.monotonic() - began < 0.8
    assert future.result(10) is None


def test_a_worker_outlives_the_thread_that_started_it():
    executor = make_executor("mp", COUNTER, [{}])
    thread = threading.Thread(target=executor.start)
    thread.start()
    thread.join(20)
    time.sleep(0.2)
    assert executor.rpc(0, "add").result(5) == 1
    executor.close()


OWNER = """
import sys, time
from reef.runtime.executor import make_executor
executor = make_executor("mp", "tests.executor.workers:Counter", [{}, {}])
executor.start()
executor.rpc(0, "sleep", 60)
print(*executor.pids, flush=True)
time.sleep(60)
"""


def test_workers_die_with_an_owner_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
        owner.kill()
    assert gone_within(pids, 5)


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
    assert gone_within(pids, 8)
