"""This process among those that serve from one database: one of them trains, all of them serve and record.

::

    every third of the lease     take or renew it ──► mine?
    every second                 mine, newly   ──► serve the committed heads, begin from the store's state: it trains
                                 somebody's    ──► serve what they released

The lease decides who begins a step; the store decides, by the same lease and inside the commit's transaction, whose
step is committed. So a process that was frozen and does not know that its time is over does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from reef.directories import replace_file
from reef.errors import ReefError
from reef.runtime.interfaces import Candidate, Release, ReleaseKind, ScenarioState, Storage, TrainingRuntime, WeightKind

log = logging.getLogger("reef.service")

FOLLOWING = "following_"  # how the ids of jobs begin that serve what another process committed
POLL_SECONDS = 1.0

OnState = Callable[[ScenarioState], Awaitable[None]]


class Membership:
    """Construct it before the store is open, `begin` once it is, `watch` once this process serves."""

    def __init__(
        self, storage: Storage, data_dir: Path, seconds: float, *, follow: OnState, take_over: OnState
    ) -> None:
        """`follow` serves a state that another process committed; `take_over` also makes it the trainer's own."""
        self._storage = storage
        self._data_dir = data_dir
        self._seconds = seconds
        self._follow = follow
        self._take_over = take_over
        self._mine_until = 0.0  # by the monotonic clock
        self._ready = False  # what the store holds is this process's own state
        self._owner = ""
        self._tasks: list[asyncio.Task[None]] = []
        self.trouble = ""  # why this process does not serve what others released

    @property
    def trains(self) -> bool:
        return self._ready and time.monotonic() < self._mine_until

    def elsewhere(self) -> str | None:
        """Why this process must not train, release or roll back; None when it is the one that does."""
        if self.trains:
            return None
        return f"another process on this database trains ({self._owner or 'none yet'}): ask that one"

    async def begin(self) -> None:
        """Ask for the lease before recovery, which is different for whoever does not train; keep it from then on."""
        self._holder = f"{socket.gethostname()}:{self._data_dir.resolve()} ({identity(self._data_dir)})"
        await self._renew()
        self._ready = time.monotonic() < self._mine_until
        if not self._ready:
            log.warning("%s; this one serves, records and follows", self.elsewhere())
        self._begin_to(self._renew, self._seconds / 3)

    def watch(self) -> None:
        self._begin_to(self._look, min(POLL_SECONDS, self._seconds / 3))

    def _begin_to(self, action: Callable[[], Awaitable[None]], seconds: float) -> None:
        task = asyncio.create_task(self._repeat(action, seconds), name=f"membership:{action.__name__}")
        self._tasks.append(task)

    async def close(self) -> None:
        """Give the lease back, so that another process takes over at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._mine_until = 0.0
        try:
            await self._storage.end_lease()
        except ReefError as error:
            log.warning("the training lease ends by itself: %s", error)

    async def _repeat(self, action: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await action()
            except ReefError as error:
                log.warning("%s", error)
            except Exception:  # this loop must outlive whatever fails in it
                log.exception("membership")

    async def _renew(self) -> None:
        asked = time.monotonic()
        if await self._storage.take_lease(self._holder, self._seconds):
            if time.monotonic() >= self._mine_until:  # it had ended: another process may have trained meanwhile
                self._ready = False
            self._mine_until = asked + self._seconds
        else:
            self._mine_until = 0.0
            self._owner = await self._storage.lease_holder() or ""

    async def _look(self) -> None:
        if self.trains:
            return
        mine = time.monotonic() < self._mine_until
        self._ready = False
        try:
            for state in await self._storage.scenarios():
                await (self._take_over if mine else self._follow)(state)
        except ReefError as error:
            self.trouble = f"cannot serve what another process released: {error}"
            raise
        self.trouble = ""
        if mine:
            self._ready = True
            log.warning("this process trains from now on")


def identity(data_dir: Path) -> str:
    """What names this data directory's process, the same in each run: one process at a time has the directory."""
    path = data_dir / "identity"
    if not path.exists():
        replace_file(path, uuid.uuid4().hex[:12].encode())
    return path.read_text()


async def serve_release(training: TrainingRuntime, head: Release) -> None:
    """Bring this process's engines to a release that another one committed, by the way of every publication.

    Raises ReefError, with the engines back at the release before.
    """
    probe = head.metrics.get("probe_logprobs", [])
    candidate = Candidate(
        job_id=FOLLOWING + head.release_id,
        scenario=head.scenario,
        content_id=head.content_id,
        state_id=head.state_id,
        kind=WeightKind.LORA,  # the content itself tells; nobody reads this
        runtime_load_id=head.runtime_load_id,
        probe_logprobs=probe,
        incumbent_probe_logprobs=probe,  # a coordinator that was replaced serves it already
        origin=ReleaseKind.PROMOTED,
        source_release_id=head.release_id,
    )
    try:
        await training.adopt(candidate)
        await training.publish(candidate)
    except ReefError as error:
        await training.reject(candidate.job_id, str(error))
        raise
    await training.acknowledge(candidate.job_id, head)
    log.info("scenario %s: serves release %d of another process", head.scenario, head.number)
