"""What an engine will be asked to read, looked at first: SGLang reports a missing file only when it is half done."""

from __future__ import annotations

import json
from pathlib import Path

from reef.errors import EngineError
from reef.runtime.interfaces import WeightKind, WeightLoad


def check_weights_directory(load: WeightLoad) -> None:
    """Raises EngineError if the files that this kind of load needs are not there."""
    directory = Path(str(load.path))
    if load.kind is WeightKind.LORA:
        wanted = ["adapter_config.json", "adapter_model.safetensors"]
    else:
        index = directory / "model.safetensors.index.json"
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        wanted = ["config.json", *sorted(files)]
    for name in wanted:
        if not (directory / name).is_file():
            raise EngineError(f"{load.runtime_load_id}: {directory} has no {name}")
