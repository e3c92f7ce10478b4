"""The base model of a deployment: its content id, a hash of every file, and what was last served of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from reef.directories import replace_file
from reef.errors import ConfigError

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".json", ".jinja", ".model", ".txt")


@dataclass(slots=True, frozen=True)
class Serving:
    """What a data directory was last served with; whoever reads the directory alone needs it."""

    model_path: str
    dtype: str  # what its engines compute in; empty: unknown
    database: str = ""  # where the records are, without a password; empty: reef.db in the directory
    artifacts: str = ""  # where the weights are; empty: in the directory


def write_serving(data: Path, serving: Serving) -> None:
    replace_file(data / "serving.json", json.dumps(asdict(serving)).encode())


def read_serving(data: Path) -> Serving | None:
    """None if the directory was never served, or the file is of no use."""
    try:
        return Serving(**json.loads((data / "serving.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def base_content_id(model: Path, memory: Path, *, keep: bool = True) -> str:
    """Hash the model file or directory `model`; `memory` is a small JSON file that saves hashing it again.

    Without `keep` the memory is read and never written.

    Raises ConfigError if there is no model there.
    """
    if model.is_file():
        files = [model]
    elif model.is_dir():
        files = sorted(path for path in model.iterdir() if path.is_file() and path.suffix in WEIGHT_SUFFIXES)
    else:
        raise ConfigError(f"inference.model-path: there is no model at {str(model)!r}")
    if not files:
        raise ConfigError(f"inference.model-path: {str(model)!r} holds no model files")
    fingerprint = [[path.name, (stat := path.stat()).st_size, stat.st_mtime_ns] for path in files]
    try:
        known = json.loads(memory.read_text())
        if known["fingerprint"] == fingerprint:
            return str(known["content_id"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no memory yet, or one that is of no use
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    content_id = digest.hexdigest()
    if not keep:
        return content_id
    memory.parent.mkdir(parents=True, exist_ok=True)
    memory.write_text(json.dumps({"fingerprint": fingerprint, "content_id": content_id}))
    return content_id
