"""Prefix-cache entries that name the weights they were computed with.

SGLang files a cached prefix under its tokens and the request's `extra_key`. Here every request's key also carries the
runtime load ID of the weights that will prefill it, so an entry can never serve a request under other weights, whether
or not the cache was flushed between. Three moments decide a key: a request arrives; it loses its KV and will be
prefilled again; the weights change while it waits. One that is frozen in mid-generation keeps its key with its KV:
what it adds to the cache stays under the old load, which nobody asks for any more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

SEPARATOR = "|reef:"


def enabled() -> bool:
    return os.environ.get("REEF_SGLANG_VERSION_KEYS", "1") == "1"


def served_weights() -> str:
    """The runtime load ID of the base weights in this process."""
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)


def key_request(req: Any, version: str) -> None:
    """File what this request computes from now on under `version`."""
    own = (req.extra_key or "").partition(SEPARATOR)[0]
    req.extra_key = f"{own}{SEPARATOR}{version}"


def on_arrival(result: None, req: Any, *_: Any, **__: Any) -> None:
    """After `Req.__init__`."""
    key_request(req, served_weights())


def on_retract(result: None, req: Any, *_: Any, **__: Any) -> None:
    """After `Req.reset_for_retract`: its KV is gone, the next prefill is by the weights of now."""
    key_request(req, served_weights())


def on_new_weights(result: None, scheduler: Any, *_: Any, **__: Any) -> None:
    """After `Scheduler.record_weight_version_change`: whoever holds no KV yet will be prefilled by the new weights."""
    waiting: Iterable[Any] = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    for req in waiting:
        if not req.kv.holds_kv:
            key_request(req, served_weights())
