"""Another process took over training: the step in flight ends without a trace, and learning waits for the lease."""

from __future__ import annotations

import asyncio

import pytest

from reef.errors import Unavailable
from reef.records.sqlite import SqliteStorage
from reef.runtime.interfaces import BASE_LOAD_ID, Disposition, MarkerState
from tests.records.values import discard
from tests.scenario.harness import Harness
from tests.scenario.test_failures import teach
from tests.scenario.test_scenario import run


class Rival:
    """Another process on the same database, which steals the lease when the next release is about to be committed."""

    def __init__(self, reef: Harness) -> None:
        self.storage = SqliteStorage(reef.path / "reef.db")
        self.trains = False
        self._reef = reef
        self._commit = reef.storage.commit
        reef.storage.commit = self._steal
        reef.services.elsewhere = lambda: "the rival trains: ask that one" if self.trains else None

    async def open(self) -> None:
        await self.storage.open()
        assert await self._reef.storage.take_lease("reef", 60.0)

    async def _steal(self, commit):
        if commit.release is not None and not self.trains:
            self._reef.storage.commit = self._commit
            connection = self.storage.database.connect()
            connection.execute("UPDATE lease SET expires = 1")  # as if this process had been frozen for long
            connection.close()
            assert await self.storage.take_lease("rival", 60.0)
            self.trains = True
        return await self._commit(commit)


def test_a_step_that_lost_the_lease_is_undone_and_its_records_train_elsewhere(tmp_path):
    async def body(reef: Harness) -> None:
        rival = Rival(reef)
        await rival.open()
        await teach(reef, "a", "b")
        await reef.until(lambda: rival.trains and reef.state() is MarkerState.REJECTED and not reef.engines.paused)
        await reef.until(lambda: "rival holds the training lease" in reef.scenario._steps.outcome)
        assert reef.scenario.head.number == 0 and await reef.storage.consumed("s", ["a", "b"]) == {}
        assert reef.engines.lanes.get("s", BASE_LOAD_ID) == BASE_LOAD_ID

        for wish in (reef.scenario.rollback(), reef.scenario.promote("x"), reef.scenario.update()):
            with pytest.raises(Unavailable, match="ask that one"):
                await wish
        known = (await reef.scenario.status())["waiting"]
        await reef.feedback("c", 0.0)
        await asyncio.sleep(0.2)
        assert reef.state() is MarkerState.REJECTED and await reef.storage.commits("s") == []
        assert (await reef.scenario.status())["waiting"] == known  # c is somebody else's to learn from

        await rival.storage.commit(discard("theirs", ["a", "report-a"]))
        await rival.storage.end_lease()
        assert await reef.storage.take_lease("reef", 60.0)
        state = await reef.storage.scenario("s")
        reef.scenario.follow(state)
        await reef.scenario.take_over(state)
        rival.trains = False
        await reef.released(1)  # from what the other one left
        fates = await reef.storage.consumed("s", ["a", "b", "c"])
        assert fates == {"a": Disposition.STALE, "b": Disposition.TRAINED, "c": Disposition.TRAINED}
        await rival.storage.close()

    run(body, tmp_path)
