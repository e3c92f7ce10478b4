"""One process trains: the lease, its end, and what a commit of a tenure that has ended comes to. Every storage."""

from __future__ import annotations

import asyncio

import pytest

from reef.errors import LeaseLost
from tests.records.values import base, discard, exchange, training


@pytest.fixture
def other(make_storage, storage, run):
    opened = make_storage()
    run(opened.open())
    yield opened
    run(opened.close())


def expire(storage):
    """As if its time had passed."""
    connection = storage.database.connect()
    connection.execute("UPDATE lease SET expires = 1")
    connection.close()


def test_one_of_many_takes_it(storage, other, run):
    async def race():
        return await asyncio.gather(storage.take_lease("a", 60.0), other.take_lease("b", 60.0))

    assert sorted(run(race())) == [False, True]
    assert run(storage.lease_holder()) in ("a", "b")


def test_it_is_renewed_and_given_back(storage, other, run):
    assert run(storage.lease_holder()) is None
    assert run(storage.take_lease("a", 60.0)) and run(storage.take_lease("a", 60.0))
    assert run(other.lease_holder()) == "a"
    assert not run(other.take_lease("b", 60.0))
    run(storage.end_lease())
    assert run(storage.lease_holder()) is None
    assert run(other.take_lease("b", 60.0))
    run(storage.end_lease())  # no longer its own
    assert run(storage.lease_holder()) == "b"


def test_it_ends_by_the_clock_of_the_store(storage, other, run):
    assert run(storage.take_lease("a", 0.2))

    async def wait():
        while not await other.take_lease("b", 60.0):
            await asyncio.sleep(0.02)

    run(wait())
    assert run(storage.lease_holder()) == "b"
    assert not run(storage.take_lease("a", 60.0))


def test_only_the_holder_commits_and_everybody_records(storage, other, run):
    head = run(storage.create_scenario(base())).head
    assert run(storage.take_lease("a", 60.0))
    run(other.append(exchange("x")))
    with pytest.raises(LeaseLost, match="a holds the training lease"):
        run(other.commit(discard("c", ["x"])))
    stored = run(storage.commit(training("c1", head, ["x"])))
    assert run(other.scenario("s")).head == stored.release
    assert run(other.commit(training("c1", head, ["x"]))) == stored  # reading back what is committed is harmless


def test_a_tenure_that_was_taken_over_commits_nothing_any_more(storage, other, run):
    """It was frozen, and does not know: the commit itself is refused, at whatever moment it comes."""
    head = run(storage.create_scenario(base())).head
    run(storage.append(exchange("x")))
    assert run(storage.take_lease("a", 60.0))
    expire(storage)
    assert run(other.take_lease("b", 60.0))
    with pytest.raises(LeaseLost):
        run(storage.commit(training("c1", head, ["x"])))
    expire(other)
    with pytest.raises(LeaseLost):  # still another tenure than its own
        run(storage.commit(training("c1", head, ["x"])))
    assert run(storage.scenario("s")).head == head and run(storage.consumed("s", ["x"])) == {}
    assert run(other.commit(training("c2", head, ["x"]))).step == 1
    assert run(storage.take_lease("a", 60.0))  # a new tenure
    assert run(storage.commit(discard("c3", []))).step == 2


def test_nobody_took_over_an_expired_tenure(storage, run):
    head = run(storage.create_scenario(base())).head
    assert run(storage.take_lease("a", 60.0))
    expire(storage)
    assert run(storage.commit(training("c1", head, []))).step == 1


def test_the_same_holder_started_again_ends_its_own_old_tenure(storage, make_storage, run):
    run(storage.create_scenario(base()))
    assert run(storage.take_lease("a", 60.0))
    again = make_storage()
    run(again.open())
    assert run(again.take_lease("a", 60.0))  # at once, not after the lease has ended
    with pytest.raises(LeaseLost):
        run(storage.commit(discard("c", [])))
    assert run(again.commit(discard("c", []))).step == 1
    run(again.close())
