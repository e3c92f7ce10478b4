"""How records are kept. The sections' owner-written keys, one struct for each backend."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta


class StorageConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Section `storage` of the deployment file: what both backends have."""

    artifacts: Annotated[
        str | None,
        Meta(
            description="directory of weights and optimizer states, shared by every process on this database; "
            "default: artifacts in the data directory"
        ),
    ] = None
    lease_seconds: Annotated[
        float,
        Meta(
            description="how long the one process that trains keeps the right to after it was heard of last; "
            "then another one on this database takes over",
            ge=1.0,
            le=3600.0,
        ),
    ] = 10.0
    retention_days: Annotated[
        float,
        Meta(description="days until consumed records lose their bodies and keep the hashes; 0: never", ge=0),
    ] = 0.0
    retention_gib: Annotated[
        float,
        Meta(description="GiB of stored records, above which the oldest consumed ones lose theirs; 0: no limit", ge=0),
    ] = 0.0
    retention_unreported_days: Annotated[
        float,
        Meta(
            description="days after which answers that nobody reported on are written off and lose their bodies; "
            "0: never, for a report may still come",
            ge=0,
        ),
    ] = 0.0


class SqliteConfig(StorageConfig, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Backend `sqlite`: one file."""

    path: Annotated[str | None, Meta(description="database file; default: reef.db in the data directory")] = None
    busy_timeout: Annotated[
        float, Meta(description="seconds to wait for another process that writes to the file", gt=0, le=600)
    ] = 10.0
    read_threads: Annotated[int, Meta(description="threads, each with a read-only connection", ge=1, le=64)] = 4


class PostgresConfig(StorageConfig, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Backend `postgres`: one schema of a PostgreSQL database, for one process or several. Needs 'reef[postgres]'."""

    url: Annotated[
        str,
        Meta(
            description="postgresql://user@host:port/database; a password may also come from PGPASSWORD or ~/.pgpass",
            extra={"secret": True},
        ),
    ] = ""
    schema: Annotated[
        str,
        Meta(description="schema that holds this deployment; made on first use", pattern=r"^[a-z_][a-z0-9_]{0,62}$"),
    ] = "reef"
    connections: Annotated[int, Meta(description="connections for reads; one more writes", ge=1, le=64)] = 4
    connect_timeout: Annotated[
        float, Meta(description="seconds for which a write waits for a server that is away", gt=0, le=600)
    ] = 5.0
    lock_timeout: Annotated[
        float, Meta(description="seconds to wait for another process that writes", gt=0, le=600)
    ] = 10.0

    def __post_init__(self) -> None:
        if not self.url:
            raise ValueError("storage.url is required with storage.backend postgres: postgresql://user@host/database")
        try:
            scheme = urlsplit(self.url).scheme
        except ValueError:
            scheme = ""
        if scheme not in ("postgresql", "postgres"):  # and never show it: it may hold a password
            raise ValueError("storage.url must be postgresql://user@host:port/database, got something else")
        if self.schema.startswith("pg_"):
            raise ValueError(f"storage.schema must not start with pg_, which is PostgreSQL's own, got {self.schema}")
