"""Bringing one schema of a PostgreSQL database to the version that this Reef knows, by Alembic."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from reef.errors import StorageError

HEAD = "0001"  # the newest file in migrations/versions
OLDEST_SERVER = 130000


def create_or_verify(
    raw: psycopg.Connection[Any], schema: str, name: str, connect: Callable[[], psycopg.Connection[Any]]
) -> None:
    """Create the schema with its tables, migrate an older one, or refuse. Killed anywhere, it has done all or nothing.

    Raises StorageError for a foreign or newer schema, psycopg.Error for what the server refuses.
    """
    if raw.info.server_version < OLDEST_SERVER:
        raise StorageError(f"{name} is PostgreSQL {raw.info.server_version // 10000}: Reef needs 13 or later")
    found = version(raw, schema, name)
    raw.rollback()
    if found is not None and found > HEAD:
        raise StorageError(f"{name} has version {found}, this Reef knows {HEAD}: use the Reef that wrote it")
    if found != HEAD:
        _migrate(schema, name, connect)


def version(raw: psycopg.Connection[Any], schema: str, name: str) -> str | None:
    """The version of the schema's tables; None if there are none yet. Raises StorageError for somebody else's."""
    if raw.execute("SELECT to_regclass(%s)", (f"{schema}.alembic_version",)).fetchone() == (None,):
        statement = "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s"
        if raw.execute(statement, (schema,)).fetchone() != (0,):
            raise StorageError(f"{name} holds tables of another program: choose another storage.schema")
        return None
    row = raw.execute(f"SELECT version_num FROM {schema}.alembic_version").fetchone()
    return None if row is None else str(row[0])


def _migrate(schema: str, name: str, connect: Callable[[], psycopg.Connection[Any]]) -> None:
    from alembic import command
    from alembic.config import Config
    from sqlalchemy import create_engine
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.pool import NullPool

    config = Config()
    place = Path(__file__).with_name("migrations")
    config.set_main_option("script_location", str(place).replace("%", "%%"))
    engine = create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool)
    try:
        with engine.begin() as connection:
            # Of two processes that create it, one waits and finds it created.
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({zlib.crc32(b'reef' + schema.encode())})")
            exists = connection.exec_driver_sql("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).first()
            if exists is None:
                connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
            connection.exec_driver_sql(f"SET LOCAL search_path = {schema}")
            config.attributes |= {"connection": connection, "schema": schema}
            command.upgrade(config, "head")
    except DBAPIError as error:
        raise error.orig or error from error
