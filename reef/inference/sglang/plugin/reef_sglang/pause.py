"""A paused scheduler is idle on the device, whatever waits: so a flush behind a pause must succeed."""

from __future__ import annotations

from typing import Any


def is_fully_idle(original: Any, scheduler: Any, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
    """Around `Scheduler.is_fully_idle`: behind a pause, requests whose grammar still compiles wait like the others.

    They hold no KV, and their compilation goes on. Every other check is SGLang's own.
    """
    if not (ignore_waiting and scheduler._engine_paused):
        return bool(original(scheduler, for_health_check=for_health_check, ignore_waiting=ignore_waiting))
    manager = scheduler.grammar_manager
    queue, manager.grammar_queue = manager.grammar_queue, []
    try:
        return bool(original(scheduler, for_health_check=for_health_check, ignore_waiting=True))
    finally:
        manager.grammar_queue = queue
