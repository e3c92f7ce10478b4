"""What leaves a real SGLang engine in doubt, and its replacement. The last of the modules that share an engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import pytest

from reef.errors import BarrierError
from reef.runtime.interfaces import Ending, PauseMode
from tests.engines.sglang import PREFIX, SECONDS, START_SECONDS, ask, assert_scores, start, until

pytestmark = pytest.mark.timeout(3600)  # a server starts in half a minute, on a busy machine in many

PROMPT = PREFIX[:40]


def test_flush_that_is_refused_fails_the_barrier_and_the_engine_is_replaced(served) -> None:
    async def test(handler) -> None:
        asked = start(handler, [700, 701], 2000)
        await asked.has(2)
        await asyncio.to_thread(served.backend.pause, PauseMode.IN_PLACE)
        with pytest.raises(BarrierError, match="refused POST /flush_cache"):
            await asyncio.to_thread(served.backend.flush)
        assert "flush_cache" in served.backend.health()
        await asyncio.to_thread(served.backend.restart)
        assert served.backend.health() is None
        report = served.report()
        assert report.paused and report.lanes == {} and report.loads == {"engine:0": "base"}
        assert (await asked.task).ending is Ending.ENGINE_CUT
        await handler.connect()
        await asyncio.to_thread(served.backend.resume)
        assert_scores(await ask(handler, PREFIX[:50]), served.model, PREFIX[:50])

    served.run(test, START_SECONDS + SECONDS)


def test_scheduler_that_dies_cuts_requests_and_is_noticed(served) -> None:
    """Last: the engine is gone afterwards."""

    async def test(handler) -> None:
        asked = start(handler, PROMPT, 2000)
        await asked.has(2)
        os.kill(scheduler(served), signal.SIGKILL)
        answer = await asked.task
        assert answer.ending is Ending.ENGINE_CUT and answer.error
        await until(lambda: served.backend.health() is not None)
        assert "engine-0" in served.backend.health()

    served.run(test)


def scheduler(served) -> int:
    """Process id of the engine's scheduler."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    lease = served.backend._engines[0]._process._process.pid
    family = {lease}
    for _ in range(4):
        family |= {int(pid) for pid, parent, _ in rows if int(parent) in family}
    return next(int(pid) for pid, _, args in rows if int(pid) in family and "scheduler" in args)
