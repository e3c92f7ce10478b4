"""What every executor promises."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from reef.errors import ConfigError, EngineUncertain, InvalidRequest, ReefError, WorkerDied
from reef.runtime.executor import MpExecutor, make_executor, resolve_kind
from reef.runtime.executor.owner import wait_until_started
from tests.executor.conftest import alive

COUNTER = "tests.executor.workers:Counter"


PROCESSES = pytest.mark.parametrize("kind", ["mp", "ray"], scope="module")


@pytest.fixture(params=["uni", "mp", "ray"], scope="module")
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def kept(kind, make_for_module):
    executor = make_for_module(kind, COUNTER, [{}, {}], name="counter")
    executor.start()
    return executor


@pytest.fixture
def executor(kept):
    """Two counters, at 0 and 10; for tests that leave them alive."""
    kept.rpc(0, "set", 0).result(60)
    kept.rpc(1, "set", 10).result(60)
    return kept


@pytest.fixture
def doomed(kind, make):
    """The same, for tests that end them."""
    executor = make(kind, COUNTER, [{}, {"start": 10}], name="doomed")
    executor.start()
    return executor


def test_calls_reach_their_rank_and_keep_their_order(executor):
    futures = [executor.rpc(1, "add", amount=n) for n in range(1, 6)]
    assert [f.result(60) for f in futures] == [11, 13, 16, 20, 25]
    assert [f.result(60) for f in executor.collective_rpc("add", 1)] == [1, 26]


def test_each_worker_keeps_one_thread(executor):
    first = executor.rpc(0, "where").result(60)
    assert executor.rpc(0, "where").result(60) == first
    assert executor.rpc(1, "where").result(60) != first


def test_reefs_errors_keep_their_class_and_fields(executor):
    with pytest.raises(InvalidRequest, match="too hot") as caught:
        executor.rpc(0, "invalid").result(60)
    assert caught.value.field == "sampling.temperature"
    with pytest.raises(EngineUncertain, match="half a transfer"):
        executor.rpc(0, "uncertain").result(60)
    with pytest.raises(AttributeError, match="no_such_method"):
        executor.rpc(0, "no_such_method").result(60)
    assert executor.rpc(0, "add").result(60) == 1


def test_a_timeout_stops_the_waiting_and_nothing_is_sent_twice(executor, tmp_path):
    slow = executor.rpc(0, "wait_for", str(tmp_path / "go"))
    with pytest.raises(TimeoutError):
        slow.result(0.05)
    assert not slow.cancel()
    (tmp_path / "go").touch()
    assert slow.result(60) == "there"
    assert executor.rpc(0, "add").result(60) == 1


def test_many_threads_may_call(executor):
    def call():
        for _ in range(50):
            executor.rpc(0, "add").result(60)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert executor.rpc(0, "add", 0).result(60) == 400


def test_close_finishes_what_was_sent_and_lets_the_worker_close(doomed, tmp_path):
    doomed.rpc(0, "write_on_close", str(tmp_path / "closed"))
    doomed.rpc(0, "sleep", 0.2)
    last = doomed.rpc(0, "add", 5)
    doomed.close(60)
    assert last.result(0) == 5
    assert (tmp_path / "closed").read_text() == "5"
    with pytest.raises(WorkerDied, match="doomed-0"):
        doomed.rpc(0, "add").result(60)
    doomed.close()


def test_a_failing_constructor_fails_the_start(kind, make):
    broken = make(kind, COUNTER, [{}, {"broken": True}], name="broken")
    with pytest.raises(WorkerDied, match=r"broken-1 could not start: ValueError: start must be >= 0, got -1") as caught:
        broken.start()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(WorkerDied):
        broken.rpc(0, "add").result(60)


# What those promise whose workers can die.


@PROCESSES
def test_death_by_signal_fails_everything_pending(doomed):
    pending = [doomed.rpc(0, "sleep", 600), doomed.rpc(0, "add")]
    os.kill(doomed.pids[0], signal.SIGKILL)
    for future in pending:
        with pytest.raises(WorkerDied, match=rf"doomed-0 \(pid {doomed.pids[0]}\)"):
            future.result(60)
    with pytest.raises(WorkerDied):
        doomed.rpc(0, "add").result(0)
    assert "doomed-0" in doomed.health()
    assert doomed.rpc(1, "add").result(60) == 11


@PROCESSES
def test_the_death_of_an_idle_worker_is_noticed_and_told_once(kind, make):
    heard, late = [], []
    executor = make(kind, COUNTER, [{}, {}], name="idle")
    executor.on_failure(heard.append)
    executor.start()
    for pid in executor.pids:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not heard and time.monotonic() < deadline:
        time.sleep(0.02)
    executor.close()
    executor.on_failure(late.append)
    assert len(heard) == len(late) == 1


@PROCESSES
def test_a_close_is_no_failure(kind, make):
    heard = []
    executor = make(kind, COUNTER, [{}], name="quiet")
    executor.on_failure(heard.append)
    executor.start()
    executor.close()
    assert not heard and "quiet-0" in executor.health()


@PROCESSES
def test_death_quotes_the_last_output_which_is_in_the_log(kind, make, tmp_path):
    executor = make(kind, COUNTER, [{}], name="engine", log_directory=tmp_path / "logs")
    executor.start()
    with pytest.raises(WorkerDied, match="its last output:\nlast words"):
        executor.rpc(0, "exit", 3).result(60)
    assert (tmp_path / "logs" / "engine-0.log").read_text() == "last words\n"


@PROCESSES
def test_death_in_the_constructor_fails_the_start(kind, make, tmp_path):
    executor = make(kind, "tests.executor.workers:Dies", [{}], name="dies", log_directory=tmp_path)
    with pytest.raises(WorkerDied, match=r"(?s)dies-0.*its last output:\ncannot live"):
        executor.start()


@PROCESSES
def test_a_foreign_exception_arrives_as_text_with_its_traceback(executor):
    with pytest.raises(ReefError, match=r"^Foreign: from afar") as caught:
        executor.rpc(0, "foreign").result(60)
    assert type(caught.value) is ReefError
    assert "workers.py" in caught.value.__notes__[0]


@PROCESSES
def test_what_cannot_be_pickled_fails_its_call_only(executor):
    with pytest.raises(TypeError, match="pickle"):
        executor.rpc(0, "unpicklable").result(60)
    with pytest.raises(TypeError, match="pickle"):
        executor.rpc(0, "add", threading.Lock()).result(60)
    assert executor.rpc(0, "add").result(60) == 1


@PROCESSES
def test_calls_run_on_the_main_thread_and_the_environment_is_per_worker(kind, make):
    env = [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "3"}]
    executor = make(kind, COUNTER, [{}, {}], env_per_rank=env)
    executor.start()
    assert executor.rpc(0, "where").result(60) == (executor.pids[0], "MainThread")
    assert [f.result(60) for f in executor.collective_rpc("environment", "OMP_NUM_THREADS")] == ["1", "3"]


@PROCESSES
def test_workers_ignore_the_interrupt_of_a_terminal(executor):
    for pid in executor.pids:
        os.kill(pid, signal.SIGINT)
    assert [f.result(60) for f in executor.collective_rpc("add")] == [1, 11]


@PROCESSES
def test_close_ends_a_process_that_refuses(kind, make):
    executor = make(kind, "tests.executor.workers:Stubborn", [{}])
    executor.start()
    executor.close(timeout=0.3)  # it would go on for ten minutes
    assert not alive(executor.pids[0])


@PROCESSES
def test_a_large_argument_does_not_wait_for_a_busy_worker_and_a_large_result_arrives(executor, tmp_path):
    executor.rpc(0, "wait_for", str(tmp_path / "go"))
    future = executor.rpc(0, "echo", b"x" * 5_000_000)  # or it would wait here for ever
    (tmp_path / "go").touch()
    assert len(future.result(60)) == 5_000_000


@PROCESSES
def test_a_worker_outlives_the_thread_that_started_it(kind, make):
    executor = make(kind, COUNTER, [{}])
    thread = threading.Thread(target=executor.start)
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert executor.rpc(0, "add").result(60) == 1


@PROCESSES
def test_a_start_is_bounded(kind, make):
    slow = make(kind, "tests.executor.workers:Slow", [{}], name="slow", start_timeout=0.3)
    with pytest.raises(WorkerDied, match=r"slow-0 could not start: not ready within [\d.e-]+ s"):
        slow.start()


@PROCESSES
def test_one_failure_does_not_wait_for_the_others(kind, make):
    mixed = make(kind, COUNTER, [{"delay": 600}, {"broken": True}], name="mixed")
    with pytest.raises(WorkerDied, match="mixed-1 could not start"):
        mixed.start()


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.2])
@PROCESSES
def test_a_start_can_be_called_off(kind, make, delay):
    slow = make(kind, "tests.executor.workers:Slow", [{}, {}], name="slow")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(slow.start)
        time.sleep(delay)
        slow.close()
        with pytest.raises(WorkerDied, match=r"slow-\d"):
            starting.result(60)
    assert not any(alive(pid) for pid in slow.pids)


def test_the_kind_is_checked():
    with pytest.raises(ValueError, match=r"one of auto, mp, uni, ray or package\.module:Class; got 'thread'"):
        make_executor("thread", COUNTER, [{}])
    with pytest.raises(ConfigError, match=r"must be a subclass of Executor, got tests.executor.workers:Counter"):
        make_executor(COUNTER, COUNTER, [{}])
    with pytest.raises(ConfigError, match=r"cannot load tests.executor.workers:Nothing: .*Nothing"):
        make_executor("tests.executor.workers:Nothing", COUNTER, [{}])


def test_an_executor_of_ones_own_by_its_path():
    made = make_executor("reef.runtime.executor.mp:MpExecutor", COUNTER, [{"start": 4}])
    assert isinstance(made, MpExecutor)
    made.start()
    assert made.rpc(0, "add").result(60) == 5
    made.close()


def test_auto_is_ray_where_a_cluster_is_known(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert resolve_kind("auto") == "mp"
    assert resolve_kind("auto", "head:6379") == "ray"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert resolve_kind("auto") == "ray"
    assert resolve_kind("mp") == "mp"


def test_what_fails_after_a_failed_start_does_not_hide_why_it_failed():
    built = Future()
    built.set_exception(ValueError("no such model"))

    def give_up():
        raise ReefError("not known to be gone")

    with pytest.raises(WorkerDied, match="w-0 could not start: ValueError: no such model; then: not known to be gone"):
        wait_until_started([built], ["w-0"], 1.0, give_up)
