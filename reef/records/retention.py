"""Which bodies are kept, and the loop that empties the others in small batches while Reef serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from reef.errors import LeaseLost, StorageError
from reef.records.config import StorageConfig
from reef.runtime.interfaces import PurgeResult, Retention, Storage

log = logging.getLogger("reef.records")

DAY = 86_400.0
GIB = 1024**3
BATCH = 100  # records; what a batch holds up the writes of others for is milliseconds
ROUND_SECONDS = 60.0
BREATH_SECONDS = 0.05  # between batches


def retention_of(config: StorageConfig, now: float) -> Retention | None:
    """What the configuration says, at this time (Unix seconds); None: everything is kept."""
    retention = Retention(
        consumed_before=now - config.retention_days * DAY if config.retention_days else None,
        max_bytes=round(config.retention_gib * GIB) if config.retention_gib else None,
        unreported_before=now - config.retention_unreported_days * DAY if config.retention_unreported_days else None,
    )
    return None if retention == Retention() else retention


async def purge_all(storage: Storage, retention: Retention) -> PurgeResult:
    """Batch after batch until nothing is left to do; return the sum. Raises StorageError, LeaseLost."""
    total = PurgeResult(records=0, bytes=0, more=True)
    while total.more:
        result = await storage.purge(retention, BATCH)
        total = PurgeResult(total.records + result.records, total.bytes + result.bytes, result.more)
        await asyncio.sleep(BREATH_SECONDS if result.more else 0.0)
    return total


async def keep_purging(
    storage: Storage, config: StorageConfig, clock: Callable[[], float], mine: Callable[[], bool]
) -> None:
    """Until cancelled, a round a minute, in the one process whose task it is. What fails is tried in the next round."""
    while (retention := retention_of(config, clock())) is not None:
        try:
            if mine():
                done = await purge_all(storage, retention)
                if done.records:
                    log.info("retention emptied %d records and freed %d bytes", done.records, done.bytes)
        except (StorageError, LeaseLost) as error:
            log.warning("retention has to wait: %s", error)
        await asyncio.sleep(ROUND_SECONDS)
