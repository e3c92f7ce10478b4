"""Where a model's files are: a directory with safetensors, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from reef.errors import ConfigError


def model_source(path: Path) -> tuple[Path, dict[str, str]]:
    """Return what `from_pretrained` wants: a directory, and the name of a GGUF file in it if that holds the weights.

    Raises ConfigError if there is nothing at `path`.
    """
    if path.is_file():
        return path.parent, {"gguf_file": path.name}
    if not path.is_dir():
        raise ConfigError(f"there is no model at {path}")
    files = sorted(path.glob("*.gguf"))
    if files and not list(path.glob("*.safetensors")):
        return path, {"gguf_file": files[0].name}
    return path, {}
