"""From configuration to storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from reef.errors import ConfigError
from reef.records.config import PostgresConfig, SqliteConfig, StorageConfig
from reef.records.sqlite import SqliteStorage
from reef.records.store import SqlStorage


def open_storage(config: StorageConfig, data_dir: Path) -> SqlStorage:
    """The storage that `config` describes, not opened yet. Raises ConfigError."""
    if isinstance(config, PostgresConfig):
        return _postgres(
            config.url,
            schema=config.schema,
            connections=config.connections,
            connect_timeout=config.connect_timeout,
            lock_timeout=config.lock_timeout,
        )
    assert isinstance(config, SqliteConfig)
    path = Path(config.path or data_dir / "reef.db")
    return SqliteStorage(path, busy_timeout=config.busy_timeout, read_threads=config.read_threads)


def storage_at(url: str, *, read_only: bool = False) -> SqlStorage:
    """The storage at `sqlite:PATH` or `postgresql://...`, with `schema=NAME` in its query. Raises ConfigError."""
    if url.startswith("sqlite:"):
        path = url.removeprefix("sqlite:").removeprefix("//")
        if not path:
            raise ConfigError("sqlite: needs the path of the database, as in sqlite:.reef/data/reef.db")
        return SqliteStorage(Path(path), read_only=read_only)
    if not url.startswith(("postgresql://", "postgres://")):
        raise ConfigError("a database is given as sqlite:PATH or postgresql://user@host:port/database?schema=reef")
    plain, schema = _split_schema(url)
    return _postgres(plain, schema=schema, read_only=read_only)


def location(config: StorageConfig) -> str:
    """What `storage_at` takes, absolute and without a password; empty for reef.db in the data directory."""
    if isinstance(config, PostgresConfig):
        from psycopg.conninfo import conninfo_to_dict

        secret = ("password", "sslpassword")
        parts = {name: str(value) for name, value in conninfo_to_dict(config.url).items() if name not in secret}
        return "postgresql://?" + urlencode({**parts, "schema": config.schema}, quote_via=quote)
    assert isinstance(config, SqliteConfig)
    return f"sqlite:{Path(config.path).resolve()}" if config.path else ""


def _split_schema(url: str) -> tuple[str, str]:
    """`schema` is Reef's own parameter: PostgreSQL's client refuses it."""
    plain, _, query = url.partition("?")
    parameters = [part for part in query.split("&") if part]
    schemas = [part.removeprefix("schema=") for part in parameters if part.startswith("schema=")]
    rest = "&".join(part for part in parameters if not part.startswith("schema="))
    try:
        config = msgspec.convert({"url": plain, "schema": schemas[-1] if schemas else "reef"}, PostgresConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    return f"{plain}?{rest}" if rest else plain, config.schema


def _postgres(url: str, **settings: Any) -> SqlStorage:
    try:
        from reef.records.postgres import PostgresStorage
    except ModuleNotFoundError as error:
        raise ConfigError(f"storage.backend postgres needs {error.name}: pip install 'reef[postgres]'") from error
    return PostgresStorage(url, **settings)


def artifacts_directory(config: StorageConfig, data_dir: Path) -> Path:
    """Where the weights are that this database's releases name."""
    return Path(config.artifacts) if config.artifacts else data_dir / "artifacts"


def describe(config: StorageConfig, data_dir: Path) -> str:
    """Look at the database and change nothing. Raises StorageError, ConfigError."""
    return open_storage(config, data_dir).database.describe()
