"""What both executors promise."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from reef.errors import EngineUncertain, InvalidRequest, WorkerDied
from reef.runtime.executor import make_executor

COUNTER = "tests.executor.workers:Counter"


@pytest.fixture(params=["uni", "mp"])
def executor(request):
    executor = make_executor(request.param, COUNTER, [{"start": 0}, {"start": 10}], name="counter")
    executor.start()
    yield executor
    executor.close()


def test_calls_reach_their_rank_and_keep_their_order(executor):
    futures = [executor.rpc(1, "add", amount=n) for n in range(1, 6)]
    assert [f.result(10) for f in futures] == [11, 13, 16, 20, 25]
    assert [f.result(10) for f in executor.collective_rpc("add", 1)] == [1, 26]


def test_each_worker_keeps_one_thread(executor):
    first = executor.rpc(0, "where").result(10)
    assert executor.rpc(0, "where").result(10) == first
    assert executor.rpc(1, "where").result(10) != first


def test_reefs_errors_keep_their_class_and_fields(executor):
    with pytest.raises(InvalidRequest, match="too hot") as caught:
        executor.rpc(0, "invalid").result(10)
    assert caught.value.field == "sampling.temperature"
    with pytest.raises(EngineUncertain, match="half a transfer"):
        executor.rpc(0, "uncertain").result(10)
    with pytest.raises(AttributeError, match="no_such_method"):
        executor.rpc(0, "no_such_method").result(10)
    assert executor.rpc(0, "add").result(10) == 1


def test_a_timeout_stops_the_waiting_and_nothing_is_sent_twice(executor):
    slow = executor.rpc(0, "sleep", 0.5)
    with pytest.raises(TimeoutError):
        slow.result(0.05)
    assert not slow.cancel()
    assert slow.result(10) == "slept"
    assert executor.rpc(0, "add").result(10) == 1


def test_many_threads_may_call(executor):
    def call():
        for _ in range(50):
            executor.rpc(0, "add").result(10)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert executor.rpc(0, "add", 0).result(10) == 400


def test_close_finishes_what_was_sent_and_lets_the_worker_close(executor, tmp_path):
    executor.rpc(0, "write_on_close", str(tmp_path / "closed"))
    executor.rpc(0, "sleep", 0.2)
    last = executor.rpc(0, "add", 5)
    executor.close()
    assert last.result(0) == 5
    assert (tmp_path / "closed").read_text() == "5"
    with pytest.raises(WorkerDied, match="counter-0"):
        executor.rpc(0, "add").result(1)
    executor.close()


def test_a_failing_constructor_fails_the_start(executor):
    kind = "uni" if executor.rpc(0, "where").result(10)[0] == os.getpid() else "mp"
    broken = make_executor(kind, COUNTER, [{}, {"broken": True}], name="broken")
    with pytest.raises(WorkerDied, match=r"broken-1 could not start: ValueError: start must be >= 0, got -1") as caught:
        broken.start()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(WorkerDied):
        broken.rpc(0, "add").result(1)


def test_a_start_is_bounded():
    slow = make_executor("mp", "tests.executor.workers:Slow", [{}], name="slow", start_timeout=0.3)
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=r"slow-0 could not start: not ready within 0.3 s"):
        slow.start()
    assert time.monotonic() - began < 5


def test_one_failure_does_not_wait_for_the_others():
    mixed = make_executor("mp", COUNTER, [{"delay": 30}, {"broken": True}], name="mixed")
    began = time.monotonic()
    with pytest.raises(WorkerDied, match="mixed-1 could not start"):
        mixed.start()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.2])
def test_a_start_can_be_called_off(delay):
    slow = make_executor("mp", "tests.executor.workers:Slow", [{}, {}], name="slow")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(slow.start)
        time.sleep(delay)
        slow.close()
        with pytest.raises(WorkerDied, match=r"slow-\d"):
            starting.result(10)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in slow.pids)


def test_unknown_kind():
    with pytest.raises(ValueError, match="one of uni, mp; got 'ray'"):
        make_executor("ray", COUNTER, [{}])
