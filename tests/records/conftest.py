"""Every storage implementation, under the name of its backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reef.records.sqlite import SqliteStorage
from reef.runtime.interfaces import Storage

Factory = Callable[[], Storage]


@pytest.fixture
def run() -> Iterator[Callable]:
    """Run a coroutine on the one event loop of this test."""
    with asyncio.Runner() as runner:
        yield lambda awaitable: runner.run(_bounded(awaitable))


async def _bounded(awaitable):
    return await asyncio.wait_for(awaitable, 250)


@pytest.fixture(params=["sqlite", "postgres"])
def make_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Factory:
    """A factory of storages that all are the same database; not opened yet."""
    if request.param == "sqlite":
        return lambda: SqliteStorage(tmp_path / "reef.db")
    server = request.getfixturevalue("postgres")
    from reef.records.postgres import PostgresStorage

    server.empty("contract")
    return lambda: PostgresStorage(server.url, schema="contract")


@pytest.fixture
def storage(make_storage: Factory, run: Callable) -> Iterator[Storage]:
    opened = make_storage()
    run(opened.open())
    yield opened
    run(opened.close())
