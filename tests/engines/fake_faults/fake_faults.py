"""A plugin for SGLang, for tests: its scheduler refuses a flush, or does not pause, once for each file that says so.

`flush_cache` and `pause_generation` in the directory FAKE_FAULTS are those files; a fault that happens removes its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

_SCHEDULER = "sglang.srt.managers.scheduler"


def register() -> None:
    """Entry point in the group `sglang.srt.plugins`."""
    if _SCHEDULER not in sys.modules:
        return  # not the scheduler's process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, answer in (("flush_cache", False), ("pause_generation", None)):
        HookRegistry.register(f"{_SCHEDULER}.Scheduler.{name}", _Fault(name, answer), HookType.AROUND)


class _Fault:
    def __init__(self, name: str, answer: bool | None) -> None:
        self.__name__ = self.__qualname__ = f"fake_{name}"
        self._answer = answer
        self._planted = Path(os.environ["FAKE_FAULTS"]) / name

    def __call__(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            self._planted.unlink()
        except FileNotFoundError:
            return original(*args, **kwargs)
        return self._answer
