"""Memory release on a CPU: SGLang's own needs CUDA, so behind its calls the pages themselves go back to the system.

What was in them is lost, as on a GPU without a backup: the KV cache was flushed, and weights must be loaded again.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Any

_MADV_DONTNEED = 4


def release(result: Any, updater: Any, *_: Any, **__: Any) -> Any:
    """After `SchedulerWeightUpdaterManager.release_memory_occupation`."""
    if "kv_cache" in updater.offload_tags:
        _drop_pages(_kv_buffers(updater.scheduler))
    if "weights" in updater.offload_tags:
        _drop_pages(updater.tp_worker.model_runner.model.parameters())
    return result


def _kv_buffers(scheduler: Any) -> list[Any]:
    cache = scheduler.token_to_kv_pool_allocator.get_kvcache()
    return [*cache.k_buffer, *cache.v_buffer]


def _drop_pages(tensors: Iterable[Any]) -> None:
    """Give whole pages inside each tensor back; the next touch finds zeros."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    page = mmap.PAGESIZE
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = -(-storage.data_ptr() // page) * page
        length = (storage.data_ptr() + storage.nbytes() - start) // page * page
        if length > 0 and madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise failed")
