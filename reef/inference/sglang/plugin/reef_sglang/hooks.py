"""Where Reef's plugin takes hold of SGLang 0.5.23. Another version is refused: these names are no public interface."""

from __future__ import annotations

import multiprocessing
import os
import sys
from importlib.metadata import version

from . import SGLANG_VERSION, cpu_memory, grammars, lanes, logprobs, pause, routes, seeds, version_keys

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_REQUEST = "sglang.srt.managers.schedule_batch.Req"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SAMPLER = "sglang.srt.layers.sampler.Sampler"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
_MEMORY = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def register() -> None:
    """Entry point in the group `sglang.srt.plugins`; SGLang calls it in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if (found := version("sglang")) != SGLANG_VERSION:
        raise RuntimeError(f"Reef's plugin is for SGLang {SGLANG_VERSION}, this is {found}")
    main = multiprocessing.parent_process() is None
    if not main and "sglang.srt.managers.scheduler" not in sys.modules:
        return  # the detokenizer: nothing to do there, and applying hooks would import the whole of SGLang
    add = HookRegistry.register
    add(f"{_SCHEDULER}.is_fully_idle", pause.is_fully_idle, HookType.AROUND)
    add(f"{_STATE}.get_internal_state", routes.scheduler_state, HookType.AFTER)
    add(f"{_REQUEST}.__init__", seeds.on_arrival, HookType.AFTER)
    add(f"{_REQUEST}.update_finish_state", grammars.give_up, HookType.BEFORE)
    add(f"{_RUNNER}.sample", seeds.tell_rows, HookType.BEFORE)
    add(f"{_RUNNER}._preprocess_logits", logprobs.keep_model_logits, HookType.AROUND)
    add(f"{_SAMPLER}.forward", logprobs.sample, HookType.AROUND)
    add(f"{_SAMPLER}._sample_from_probs", logprobs.draw, HookType.AROUND)
    add(f"{_TOKENIZER}._validate_and_resolve_lora", lanes.resolve, HookType.BEFORE)
    add(f"{_TOKENIZER}.generate_request", lanes.generate, HookType.AROUND)
    add(f"{_TOKENIZER}.unload_lora_adapter", lanes.unload, HookType.AROUND)
    if version_keys.enabled():
        add(f"{_REQUEST}.__init__", version_keys.on_arrival, HookType.AFTER)
        add(f"{_REQUEST}.reset_for_retract", version_keys.on_retract, HookType.AFTER)
        add(f"{_SCHEDULER}.record_weight_version_change", version_keys.on_new_weights, HookType.AFTER)
    if os.environ.get("SGLANG_PLATFORM") == "reef_cpu":
        add(f"{_MEMORY}.release_memory_occupation", cpu_memory.release, HookType.AFTER)
    if main:
        add("sglang.srt.entrypoints.http_server.launch_server", routes.add_routes, HookType.BEFORE)
