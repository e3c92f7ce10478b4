"""CPU kernels of Reef's own, compiled at first use. Where that fails, torch does the work.

They pay: attention reads pages in place instead of gathering them, and a matrix product of few rows, with weights that
are packed and lie in huge pages, runs at the speed of memory or of the processor, whichever is slower. Needs a C++
compiler with OpenMP; the library is kept in the user's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reef.directories import cache_directory
from reef.inference.local.attention import AttentionPlan, attend_prefills
from reef.inference.local.ops import Linear, Ops

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cpp")
# Not -ffast-math: it would switch off denormals for the whole process.
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC")
_COMPILE_SECONDS = 120
_PACKED = {torch.float32: (16, 1), torch.bfloat16: (32, 2)}  # outputs, inputs: how weights lie together
_SHORT_PREFILL = 32
_HUGE_PAGE = 2 << 20  # bytes
_SLAB = 16 << 20  # bytes
_HEAD_DIMS = (16, 32, 64, 80, 96, 128)
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def make_ops(kernels: str, device: torch.device, head_dim: int) -> Ops:
    """`kernels` is "auto" or "torch"."""
    if kernels == "torch" or device.type != "cpu" or head_dim not in _HEAD_DIMS:
        return Ops()
    library = _library()
    return Ops() if library is None else NativeOps(library)


class NativeOps(Ops):
    """Ops on CPU tensors in float32 and bfloat16, contiguous but for the queries of attention."""

    row_tables_up_to = _SHORT_PREFILL

    def __init__(self, library: ctypes.CDLL) -> None:
        self._add_norm = _by_dtype(library, "add_norm", "ppppiif")
        self._silu_mul = _by_dtype(library, "silu_mul", "ppii")
        self._rotate_store = _by_dtype(library, "rotate_store", "pppppppiiiii")
        self._attend_pages = _by_dtype(library, "attend_pages", "pippipppiiiii")
        self._weights = _Slabs()
        self._linear = {torch.float32: _function(library, "linear_float32", "ppppiii")}
        if hasattr(library, "linear_bfloat16"):  # compiled only for CPUs that multiply bfloat16
            self._linear[torch.bfloat16] = _function(library, "linear_bfloat16", "ppppiii")

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        outputs, inputs = weight.shape
        kernel, (block, step) = self._linear.get(weight.dtype), _PACKED[weight.dtype]
        if kernel is None or outputs % block or inputs % step:
            return super().linear(weight, bias)
        blocks = weight.view(outputs // block, block, inputs // step, step).transpose(1, 2)
        packed = self._weights.keep(blocks)
        added = None if bias is None else bias.contiguous()

        def run(x: Tensor) -> Tensor:
            x = x.contiguous()
            y = x.new_empty(len(x), outputs)
            kernel(_at(x), _at(packed), _at(added), _at(y), len(x), outputs, inputs)
            return y

        return run

    def release(self) -> None:
        self._weights = _Slabs()  # the newest slab would stay for the sake of its rest

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._add_norm[x.dtype](_at(x), _at(delta), _at(weight), _at(out), *x.shape, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape
        out = gate_up.new_empty(tokens, width // 2)
        self._silu_mul[gate_up.dtype](_at(gate_up), _at(out), tokens, width // 2)
        return out

    def rotate_store(
        self,
        heads: Tensor,
        num_kv_heads: int,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        layer: int,
        plan: AttentionPlan,
    ) -> None:
        tokens, num_heads, head_dim = heads.shape
        keys, values = (None, None) if plan.kv is None else (plan.kv.keys[layer], plan.kv.values[layer])
        self._rotate_store[heads.dtype](
            _at(heads),
            _at(cos),
            _at(sin),
            _at(positions),
            _at(plan.slots),
            _at(keys),
            _at(values),
            tokens,
            num_heads - 2 * num_kv_heads,
            num_kv_heads,
            head_dim,
            1 if plan.kv is None else plan.kv.page_size,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if plan.rows is not None:
            assert plan.kv is not None
            pages, lengths = plan.rows.pages, plan.rows.lengths
            self._attend_pages[q.dtype](
                _at(q),
                q.stride(0),
                _at(plan.kv.keys[layer]),
                _at(plan.kv.values[layer]),
                _at(pages),
                pages.shape[1],
                _at(lengths),
                _at(out),
                len(lengths),
                q.shape[1],
                k.shape[1],
                q.shape[2],
                plan.kv.page_size,
            )
        attend_prefills(q, k, v, layer, plan, out)
        return out


class _Slabs:
    """Memory in huge pages, shared by weights of any size; a slab is freed with the last tensor on it.

    Reading weights from huge pages is up to twice as fast: the processor's own prefetching ends where a page ends.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of `tensor`, at an address that is a multiple of 64."""
        size = tensor.nbytes
        if size > len(self._rest):
            self._rest = _huge_pages(max(size, _SLAB))
        own, self._rest = self._rest[:size], self._rest[size + -size % 64 :]
        return own.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _huge_pages(size: int) -> Tensor:
    """`size` bytes; in ordinary pages where the system has no others."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory`
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + size]


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _by_dtype(library: ctypes.CDLL, name: str, signature: str) -> dict[torch.dtype, Any]:
    return {dtype: _function(library, f"{name}_{suffix}", signature) for dtype, suffix in _NAMES.items()}


def _function(library: ctypes.CDLL, name: str, signature: str) -> Any:
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
    function = getattr(library, name)
    function.argtypes = [kinds[letter] for letter in signature]
    function.restype = None
    return function


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernels; None, with the reason in the log, where they cannot be had."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        logger.info("no C++ compiler: the engine runs on torch's kernels")
        return None
    try:
        path = cache_directory() / "kernels" / f"kernels-{_fingerprint(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("the engine's kernels cannot be compiled, torch's are used: %s", detail)
        return None


def _compile(compiler: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        made.replace(target)


def _fingerprint(compiler: str) -> str:
    """Of all that decides what the library contains; -march=native means the processor too."""
    processor = platform.processor() + platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        processor += next(
            (line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))), ""
        )
    parts = (_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), compiler.encode(), processor.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
