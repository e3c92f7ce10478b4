"""`reef storage`: moving a deployment to another database, and emptying what retention no longer keeps."""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import click

from reef.errors import ConfigError, StorageError
from reef.progress import Told, bars
from reef.records.config import StorageConfig
from reef.records.moving import abandon, migrate
from reef.records.opening import open_storage, storage_at
from reef.records.retention import BATCH, retention_of
from reef.records.sqlite import SqliteDatabase
from reef.runtime.interfaces import PurgeResult

LEASE_SECONDS = 60.0


@click.group("storage")
def storage() -> None:
    """Look after the database that holds records and releases."""


@storage.command("migrate")
@click.option("--from", "source", required=True, help="sqlite:PATH or postgresql://user@host:port/database?schema=NAME")
@click.option("--to", "target", required=True, help="The same; it must be new or empty.")
@click.option("--abandon", "give_up", is_flag=True, help="Give up an interrupted migration; the source serves again.")
def migrate_command(source: str, target: str, give_up: bool) -> None:
    """Move a stopped deployment from one database to another.

    \b
    Examples:
      reef storage migrate --from sqlite:.reef/data/reef.db --to "postgresql://reef@db/reef?schema=support"
      PGPASSWORD=... reef storage migrate --from postgresql://reef@db/reef --to sqlite:.reef/data/reef.db

    Interrupted in the middle, run it again and it goes on. Every table is counted and hashed on both sides at the end.
    The source stays as it was; weights stay where they are (storage.artifacts).
    """
    old, new = storage_at(source).database, storage_at(target).database
    if give_up:
        abandon(old)
        click.echo(f"given up: {old.name} may serve again, and what {new.name} holds of it never will")
        return
    with bars() as told:
        rows = migrate(old, new, told)
    counts = ", ".join(f"{number:,} {table}" for table, number in rows.items() if number)
    click.echo(f"moved {counts or 'an empty deployment'}: the same in both, by count and hash")
    click.echo(f"serve from {new.name} with storage.backend, storage.url or storage.path; {old.name} is as it was")


def compact(config: StorageConfig, data_dir: Path) -> None:
    """Apply the configured retention now, beside a running service or without one. Raises ConfigError, StorageError."""
    if retention_of(config, time.time()) is None:
        raise ConfigError(
            "storage.retention-days, -gib and -unreported-days are 0, so that everything is kept: set one of them"
        )
    with bars() as told:
        done = asyncio.run(_compact(config, data_dir, told))
    click.echo(f"emptied {done.records:,} records, {done.bytes / 1e6:,.1f} MB less")


async def _compact(config: StorageConfig, data_dir: Path, told: Told) -> PurgeResult:
    holder = f"reef storage compact, process {os.getpid()} on {socket.gethostname()}"
    opened = open_storage(config, data_dir)
    await opened.open()
    try:
        retention = retention_of(config, time.time())
        assert retention is not None
        if not (alone := await opened.take_lease(holder, LEASE_SECONDS)) and retention.unreported_before is not None:
            click.echo("reef: a service trains here: it alone writes off what nobody reported on", err=True)
            retention = replace(retention, unreported_before=None)
        total = PurgeResult(records=0, bytes=0, more=True)
        while total.more:
            done = await opened.purge(retention, BATCH)
            total = PurgeResult(total.records + done.records, total.bytes + done.bytes, done.more)
            told("empty", total.records, 0)
            alone = alone and await opened.take_lease(holder, LEASE_SECONDS)
        await opened.end_lease()
    finally:
        await opened.close()
    if alone and isinstance(opened.database, SqliteDatabase):
        await asyncio.to_thread(_shrink, opened.database)
    return total


def _shrink(database: SqliteDatabase) -> None:
    """Give free pages back to the file system, which nobody else may use meanwhile."""
    connection = database.connect()
    try:
        connection.execute("VACUUM")
    except sqlite3.OperationalError as error:
        raise StorageError(f"{database.name} could not be made smaller: {error}") from error
    finally:
        connection.close()
