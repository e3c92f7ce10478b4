from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from reef.errors import Conflict, StorageError
from reef.records.schema import connect_writer
from reef.records.sqlite import SqliteDatabase
from reef.records.writer import GroupWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.db"
    connection = connect_writer(path, 1.0)
    connection.execute("CREATE TABLE numbers (n INTEGER PRIMARY KEY)")
    connection.close()
    return path


def stored(path: Path) -> list[int]:
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT n FROM numbers ORDER BY n").fetchall()
    connection.close()
    return [number for (number,) in rows]


def insert(number: int):
    return lambda connection: connection.execute("INSERT INTO numbers VALUES (?)", (number,)).lastrowid


def insert_then(number: int, error: Exception):
    def operation(connection):
        insert(number)(connection)
        raise error

    return operation


async def outcomes(writer: GroupWriter, *operations):
    return await asyncio.gather(*map(writer.submit, operations), return_exceptions=True)


@pytest.fixture
def writer(path, run):
    writer = GroupWriter(SqliteDatabase(path, 1.0))

    async def start():
        writer.start()

    run(start())
    yield writer
    run(writer.close())


def test_results_come_after_the_commit(writer, path, run):
    async def one():
        await writer.submit(insert(1))
        return stored(path)  # another connection sees it

    assert run(one()) == [1]


def test_an_operation_that_raises_is_undone_alone(writer, path, run):
    operations = [insert(1), insert_then(2, Conflict("no")), insert(1), insert_then(3, KeyError("bug")), insert(4)]
    one, conflict, duplicate, bug, four = run(outcomes(writer, *operations))
    assert (one, four) == (1, 4)
    assert [type(error) for error in (conflict, duplicate, bug)] == [Conflict, StorageError, KeyError]
    assert stored(path) == [1, 4]


def test_an_error_of_the_database_condemns_the_group(writer, path, run):
    broken = insert_then(2, sqlite3.OperationalError("disk I/O error"))
    results = run(outcomes(writer, insert(1), broken, insert(3)))
    assert all(isinstance(result, StorageError) and "disk I/O error" in str(result) for result in results)
    assert stored(path) == []
    assert run(outcomes(writer, insert(1))) == [1]


def test_a_connection_that_is_lost_is_replaced(path, run):
    connections = []

    class FakeDatabase(SqliteDatabase):
        def connect(self):
            connections.append(super().connect())
            return connections[-1]

    async def lose():
        writer = GroupWriter(FakeDatabase(path, 1.0))
        writer.start()
        await writer.submit(insert(1))
        connections[0].close()
        lost = await outcomes(writer, insert(2))
        found = await outcomes(writer, insert(3))
        await writer.close()
        return lost, found

    lost, found = run(lose())
    assert isinstance(lost[0], StorageError)
    assert found == [3]
    assert stored(path) == [1, 3]


def test_failing_to_connect_is_reported_and_tried_again(path, run):
    refusals = [sqlite3.OperationalError("unable to open database file"), StorageError("not now")]

    class FakeDatabase(SqliteDatabase):
        def connect(self):
            if refusals:
                raise refusals.pop(0)
            return super().connect()

    async def persist():
        writer = GroupWriter(FakeDatabase(path, 1.0))
        writer.start()
        results = [(await outcomes(writer, insert(number)))[0] for number in range(3)]
        await writer.close()
        return results

    first, second, third = run(persist())
    assert "unable to open" in str(first)
    assert "not now" in str(second)
    assert third == 2


def test_submit_needs_a_started_writer(path, run):
    writer = GroupWriter(SqliteDatabase(path, 1.0))
    with pytest.raises(StorageError, match="not open"):
        writer.submit(insert(1))
    run(writer.close())
