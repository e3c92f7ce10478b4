"""The content id of the base model: a hash of every file, remembered while names, sizes and times stay the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from reef.errors import ConfigError

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".json", ".jinja", ".model", ".txt")


def base_content_id(model: Path, memory: Path) -> str:
    """Hash the model file or directory `model`; `memory` is a small JSON file that saves hashing it again.

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
    memory.parent.mkdir(parents=True, exist_ok=True)
    memory.write_text(json.dumps({"fingerprint": fingerprint, "content_id": content_id}))
    return content_id
