"""Functional checks of SGLang's prefix cache, on its own request and key objects; whatever fails answers no.

They run inside an engine (its answers are in `/reef/state`) or anywhere SGLang can be imported. No signature is looked
at: two requests are made, their keys are built the way the scheduler builds them, and a real tree is asked.
"""

from __future__ import annotations

import logging
from array import array
from typing import Any

log = logging.getLogger("reef.sglang")

TOKENS = [11, 12, 13, 14]


def adapter_scoped_prefix_cache_supported() -> bool:
    """True if identical tokens share a cached prefix under one adapter, and not under another or none."""
    try:
        first, same, other, none = (_key(_request(lora)) for lora in ("adapter-a", "adapter-a", "adapter-b", None))
        return _shared(first, same) and not _shared(first, other) and not _shared(first, none)
    except Exception as error:
        log.warning("SGLang's prefix cache could not be proven to be keyed by adapter: %r", error)
        return False


def version_keyed_prefix_cache_supported() -> bool:
    """True if Reef's plugin keeps cached prefixes of different weights apart, also for a request that waits."""
    try:
        from . import version_keys

        requests = [_request(None) for _ in range(3)]
        for req, version in zip(requests, ("engine:1", "engine:1", "engine:2"), strict=True):
            version_keys.key_request(req, version)
        first, same, other = map(_key, requests)
        version_keys.key_request(requests[1], "engine:2")  # it waited, and the weights changed
        moved = _key(requests[1])
        return (
            version_keys.enabled()
            and _shared(first, same)
            and not _shared(first, other)
            and not _shared(first, moved)
            and _shared(other, moved)
            and _hooked()
        )
    except Exception as error:
        log.warning("SGLang's prefix cache could not be proven to be keyed by runtime load ID: %r", error)
        return False


def _request(lora_id: str | None) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req(
        rid="reef-check",
        origin_input_text="",
        origin_input_ids=array("q", TOKENS),
        sampling_params=SamplingParams(max_new_tokens=1),
        lora_id=lora_id,
    )


def _key(req: Any) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(req.origin_input_ids, req.extra_key)


def _shared(stored: Any, asked: Any) -> bool:
    """Whether a tree that holds `stored` has a prefix for `asked`."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixCache

    tree = RadixCache.create_simulated()
    tree.insert(InsertParams(key=stored, value=torch.arange(len(TOKENS), dtype=torch.int64)))
    found = tree.match_prefix(MatchPrefixParams(key=asked)).device_prefix_len
    return bool(found == len(TOKENS))


def _hooked() -> bool:
    """Whether SGLang really calls Reef when a request arrives, loses its KV, and when weights change."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    hooked = (Req.__init__, Req.reset_for_retract, Scheduler.record_weight_version_change)
    return all(hasattr(function, "__wrapped__") for function in hooked)
