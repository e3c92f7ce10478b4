"""A platform on which the real SGLang server runs without a GPU: for development and CI, never for production.

Active only where the environment asks for it by name (`SGLANG_PLATFORM=reef_cpu`).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

NAME = "reef_cpu"


def activate() -> str | None:
    """Entry point in the group `sglang.srt.platforms`."""
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    _never_pin()
    return f"{__name__}.ReefCpuPlatform"


class ReefCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """Plain torch on the CPU: no graphs, no pinned memory, attention by torch itself."""

    _enum = PlatformEnum.OOT

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False


def _never_pin() -> None:
    """SGLang's LoRA code pins host memory without asking the platform, which raises where there is no accelerator."""
    torch.Tensor.pin_memory = lambda self, *_: self
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(factory: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make
