"""How records are kept."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class StorageConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Section `storage` of the deployment file."""

    backend: Annotated[Literal["sqlite"], msgspec.Meta(description="database that holds records and the chain")] = (
        "sqlite"
    )
    path: Annotated[str | None, msgspec.Meta(description="database file; default: reef.db in the data directory")] = (
        None
    )
    busy_timeout: Annotated[
        float, msgspec.Meta(description="seconds to wait for another process that writes to the file", gt=0, le=600)
    ] = 10.0
    read_threads: Annotated[int, msgspec.Meta(description="threads, each with a read-only connection", ge=1, le=64)] = 4
