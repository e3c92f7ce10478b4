from __future__ import annotations

import os
import subprocess
import sys
import time

from reef.runtime.executor import process
from reef.runtime.executor.process import Process

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(30)'])"


def test_a_process_is_known_by_when_it_started():
    me = process.identify(os.getpid())
    assert me is not None and process.lives(me)
    assert not process.lives(Process(os.getpid(), "1")), "another that had this id before"


def test_end_waits_until_it_is_gone():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]) as child:
        found = process.identify(child.pid)
        assert found is not None and not process.gone([found], 0.05)
        assert process.end(found, 5)
        assert child.wait(5) == -9
    assert process.identify(child.pid) is None and process.end(found, 0)


def test_end_lets_a_process_that_goes_by_itself_go():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2)"]) as child:
        found = process.identify(child.pid)
        assert process.end(found, 5, patience=10)
        assert child.wait(5) == 0


def test_a_family_is_found_by_a_word_and_includes_descendants():
    word = f"word-{os.getpid()}-{time.monotonic_ns()}"
    with subprocess.Popen([sys.executable, "-c", CHILD, word]) as parent:
        deadline = time.monotonic() + 10
        while len(family := process.family(word)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert parent.pid in [one.pid for one in family] and len(family) == 2
        program = os.path.basename(sys.executable)
        assert process.named(word, [program]) == {program: process.identify(parent.pid)}
        assert process.named(word, ["another"]) == {}
        for one in family:
            assert process.end(one, 5)
    assert process.family(word) == []
