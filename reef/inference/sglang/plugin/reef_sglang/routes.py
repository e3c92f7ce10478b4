"""Routes that Reef adds to SGLang's server: `GET /reef/state` and `PUT /reef/table`."""

from __future__ import annotations

from functools import cache
from typing import Any

from . import PLUGIN_VERSION
from .lanes import TABLE
from .lora_schema import adapter_scoped_prefix_cache_supported, version_keyed_prefix_cache_supported
from .version_keys import served_weights

STATE_KEY = "reef"


def add_routes(*args: Any, **kwargs: Any) -> None:
    """Before `launch_server` of SGLang's HTTP server."""
    from fastapi import Request
    from sglang.srt.entrypoints import http_server

    app = http_server.app

    async def get_state() -> dict[str, Any]:
        manager = http_server._global_state.tokenizer_manager
        states = await manager.get_internal_state()
        return {
            "plugin": PLUGIN_VERSION,
            "weights": manager.config_value("weight_version"),
            "lanes": TABLE.lanes,
            "loads": TABLE.loads,
            "adapters": _adapters(manager.lora_registry),
            "schedulers": [state[STATE_KEY] for state in states],
            "max_context": manager.context_len,
            "vocab_size": manager.model_config.vocab_size,
            "settings": _settings(manager),
            **_checks(),
        }

    async def put_table(request: Request) -> dict[str, bool]:
        body = await request.json()
        TABLE.lanes, TABLE.loads, TABLE.default = body["lanes"], body["loads"], body["default"]
        return {"ok": True}

    # Annotations are strings here, and FastAPI looks them up in the module: it must find Request there.
    globals()["Request"] = Request
    app.get("/reef/state")(get_state)
    app.put("/reef/table")(put_table)


def _adapters(registry: Any) -> dict[str, int]:
    """Adapter -> requests that use it now."""
    return {name: registry._counters[ref.lora_id].value() for name, ref in registry.get_all_adapters().items()}


@cache
def _checks() -> dict[str, bool]:
    return {
        "adapter_scoped": adapter_scoped_prefix_cache_supported(),
        "version_keyed": version_keyed_prefix_cache_supported(),
    }


def _settings(manager: Any) -> dict[str, Any]:
    args = manager.server_args.resolved_dict()
    names = ("model_path", "dtype", "disable_radix_cache", "enable_lora", "disaggregation_mode", "tp_size", "dp_size")
    return {name: args[name] for name in names}


def scheduler_state(result: Any, internal: Any, *_: Any, **__: Any) -> Any:
    """After `SchedulerInternalStateController.get_internal_state`, in the scheduler's process: for `/reef/state`."""
    import psutil
    from sglang.srt.platforms import current_platform

    scheduler = internal.scheduler
    free, total = current_platform.get_available_memory()
    on_cpu = current_platform.device_type == "cpu"
    result.internal_state[STATE_KEY] = {
        "weights": served_weights(),
        "paused": scheduler._engine_paused,
        "running": len(scheduler.running_batch.reqs),
        "waiting": len(scheduler.waiting_queue) + len(scheduler.grammar_manager.grammar_queue),
        "compiling": len(scheduler.grammar_manager.grammar_queue),
        "free_tokens": scheduler.token_to_kv_pool_allocator.available_size(),
        "cached_tokens": scheduler.tree_cache.evictable_size(),
        "total_tokens": scheduler.max_total_num_tokens,
        "resident_bytes": psutil.Process().memory_info().rss if on_cpu else total - free,
        "device_free": free,
        "released": sorted(scheduler.weight_updater.offload_tags),
    }
    return result
