"""Where an engine or a trainer computes, and how much memory its process holds there.

On CUDA that is the memory which torch has reserved on the device: the context (a few hundred megabytes) and what other
libraries take come on top and are never given back. On a CPU it is the process's resident memory. torch is imported
when it is needed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from contextlib import suppress
from typing import Any

from reef.errors import ConfigError


def choose(name: str, key: str) -> Any:
    """The torch.device for "auto", "cpu" or "cuda". Raises ConfigError naming `key` where there is no such device."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{key} is cuda, but torch finds no CUDA device")
    return torch.device(name)


def held_bytes(device: Any) -> int:
    """What this process holds of the device; 0 where the system does not tell."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.memory_reserved(device))
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def free_bytes(device: Any) -> int:
    """What nobody holds of the device; 0 where the system does not tell."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def give_back(device: Any) -> None:
    """Return the memory of tensors that nobody refers to any more to the device; freeing them alone does not."""
    gc.collect()
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library without it keeps what it keeps
            ctypes.CDLL(None).malloc_trim(0)
