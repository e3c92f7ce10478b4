"""Files of tensors (safetensors), read so that neither the disk nor a big file keeps the step loop waiting."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from reef.errors import EngineError
from reef.inference.local.slices import Slices

_BLOCK = 1 << 20  # bytes


def warm(directory: Path) -> None:
    """Read every file of `directory` through, so that reading it again finds it in memory.

    What cannot be read is left for the one who reads it again to tell.
    """
    block = bytearray(_BLOCK)
    for path in sorted(directory.glob("*")):
        try:
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass
        except OSError:
            continue


def read_tensors(path: Path) -> Slices[dict[str, Tensor]]:
    """Every tensor of one file by its name. Raises EngineError."""
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensors[name] = file.get_tensor(name)
                yield
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineError(f"cannot read the weights in {path.name}: {error}") from error
    return tensors
