from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from reef.runtime.executor import process
from reef.runtime.executor.process import Process

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"


def test_a_process_is_known_by_when_it_started():
    me = process.identify(os.getpid())
    assert me is not None and process.lives(me)
    assert not process.lives(Process(os.getpid(), "1")), "another that had this id before"


def test_end_waits_until_it_is_gone():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        found = process.identify(child.pid)
        assert found is not None and not process.gone([found], 0.05)
        assert process.end(found, 60)
        assert child.wait(60) == -9
    assert process.identify(child.pid) is None and process.end(found, 0)


def test_end_lets_a_process_that_goes_by_itself_go():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2)"]) as child:
        found = process.identify(child.pid)
        assert process.end(found, 60, patience=60)
        assert child.wait(60) == 0


def test_marked_processes_are_found_with_their_descendants_and_by_program():
    mark = f"REEF_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    environment = {**os.environ, **dict([mark.split("=")])}
    with subprocess.Popen([sys.executable, "-c", CHILD], env=environment):
        found = until_found(mark, 2)
        program = os.path.basename(sys.executable)
        assert process.named(mark, [program])[program] in found and process.named(mark, ["another"]) == {}
        for one in found:
            assert process.end(one, 60)
    assert process.marked(mark) == process.marked(mark[:-1]) == []


OWNER = """
import os, subprocess, sys, time
from reef.runtime.executor.lease import Lease
lease = Lease(sys.argv[1])
os.environ.update([sys.argv[1].split("=")])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("held", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["time.sleep(600)", "sys.exit(not lease.end())"], ids=["killed", "in good order"])
def test_what_a_lease_is_for_ends_with_its_owner(end):
    mark = f"REEF_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    owner = subprocess.Popen([sys.executable, "-c", OWNER.format(end=end), mark], stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == b"held\n"
        if "sleep" in end:
            found = until_found(mark, 1)
            owner.kill()
            assert process.gone(found, 60)
        else:
            assert owner.wait(60) == 0
        assert process.marked(mark) == []
    finally:
        owner.kill()
        owner.communicate()


def until_found(mark: str, count: int) -> list[Process]:
    deadline = time.monotonic() + 60
    while len(found := process.marked(mark)) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(found) == count
    return found
