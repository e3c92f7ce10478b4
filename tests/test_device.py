from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from reef import device  # noqa: E402
from reef.errors import ConfigError  # noqa: E402

SIZE = 64 << 20  # bytes


def test_auto_is_what_there_is(monkeypatch):
    assert device.choose("cpu", "x") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose("auto", "x") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"training\.device is cuda, but torch finds no CUDA device"):
        device.choose("cuda", "training.device")


def test_what_is_dropped_goes_back_to_the_system():
    """In a process of its own: thousands of small tensors, which the C library would keep for later."""
    code = f"""
import torch
from reef import device
cpu = torch.device("cpu")
start = device.held_bytes(cpu)
many = [torch.ones(1024) for _ in range({SIZE} // 4096)]
pinned = torch.ones(1024)  # after the others on the heap
full = device.held_bytes(cpu)
del many
device.give_back(cpu)
end = device.held_bytes(cpu)
assert full - start > 0.9 * {SIZE}, (start, full)
assert end - start < 0.2 * {SIZE}, (start, end)
assert device.free_bytes(cpu) > 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_it_imports_no_torch():
    code = "import sys, reef.device; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
