"""Who trains: taken at once or after its end, given back, lost with the database, followed meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from reef.errors import StorageError
from reef.records.sqlite import SqliteStorage
from reef.service import membership
from reef.service.membership import Membership, identity
from tests.records.values import base, training


class Member:
    """One process: its storage, its membership, and what it was told to serve."""

    def __init__(self, path, name: str, seconds: float = 60.0) -> None:
        (path / name).mkdir(exist_ok=True)
        self.storage = SqliteStorage(path / "reef.db")
        self.followed: list[str] = []
        self.taken: list[str] = []
        self.failing: StorageError | None = None
        self.membership = Membership(self.storage, path / name, seconds, follow=self._follow, take_over=self._take_over)

    async def _follow(self, state) -> None:
        if self.failing is not None:
            raise self.failing
        self.followed.append(state.head.release_id)

    async def _take_over(self, state) -> None:
        self.taken.append(state.head.release_id)

    async def begin(self) -> Member:
        await self.storage.open()
        await self.membership.begin()
        return self

    async def end(self) -> None:
        await self.membership.close()
        await self.storage.close()


async def until(condition) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr(membership, "POLL_SECONDS", 0.02)


def test_the_first_trains_and_the_second_names_it(tmp_path, run):
    async def body():
        a, b = await Member(tmp_path, "a").begin(), await Member(tmp_path, "b").begin()
        assert a.membership.trains and a.membership.elsewhere() is None
        assert not b.membership.trains and str(tmp_path / "a") in b.membership.elsewhere()
        await a.end()
        await b.end()

    run(body())


def test_one_that_stops_is_succeeded_at_once_from_what_it_committed(tmp_path, run):
    async def body():
        a, b = await Member(tmp_path, "a").begin(), await Member(tmp_path, "b", seconds=0.3).begin()
        head = (await a.storage.create_scenario(base())).head
        b.membership.watch()
        await until(lambda: b.followed)
        assert b.followed[-1] == "release-0" and not b.taken
        await a.storage.commit(training("c1", head, []))
        await until(lambda: b.followed[-1] == "release of c1")
        await a.end()
        await until(lambda: b.membership.trains)
        assert b.taken == ["release of c1"]
        await b.end()

    run(body())


def test_one_that_died_is_succeeded_when_its_lease_ends_and_never_trains_meanwhile(tmp_path, run):
    async def body():
        a, b = await Member(tmp_path, "a", seconds=0.3).begin(), await Member(tmp_path, "b", seconds=0.3).begin()
        await a.storage.create_scenario(base())
        for task in a.membership._tasks:
            task.cancel()  # it is dead, or frozen: it renews nothing
        b.membership.watch()
        await until(lambda: b.membership.trains)
        assert not a.membership.trains
        await a.storage.close()
        await b.end()

    run(body())


def test_the_same_directory_takes_its_lease_again_at_once(tmp_path, run):
    async def body():
        a = await Member(tmp_path, "a").begin()
        for task in a.membership._tasks:
            task.cancel()
        await a.storage.close()  # killed: nothing was given back
        again = await Member(tmp_path, "a").begin()
        assert again.membership.trains
        await again.end()

    run(body())
    assert identity(tmp_path / "a") != identity(tmp_path)


def test_what_cannot_be_served_is_said_until_it_can(tmp_path, run):
    async def body():
        a, b = await Member(tmp_path, "a").begin(), await Member(tmp_path, "b", seconds=0.3).begin()
        await a.storage.create_scenario(base())
        b.failing = StorageError("no content x")
        b.membership.watch()
        await until(lambda: b.membership.trouble)
        assert b.membership.trouble == "cannot serve what another process released: no content x"
        b.failing = None
        await until(lambda: not b.membership.trouble)
        await a.end()
        await b.end()

    run(body())


def test_without_the_database_nobody_trains_and_with_it_the_same_one_goes_on(tmp_path, run, monkeypatch):
    async def body():
        a = await Member(tmp_path, "a", seconds=0.2).begin()
        await a.storage.create_scenario(base())
        real = a.storage.take_lease

        async def away(holder, seconds):
            raise StorageError("away")

        monkeypatch.setattr(a.storage, "take_lease", away)
        a.membership.watch()
        await until(lambda: not a.membership.trains)
        monkeypatch.setattr(a.storage, "take_lease", real)
        await until(lambda: a.membership.trains)
        assert a.taken[-1] == "release-0"
        await a.end()

    run(body())
