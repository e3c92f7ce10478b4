"""The weights that are resident, by runtime load ID.

A LoRA load is an adapter over the base weights. A FULL load is a second complete set of weights, so that activating it
costs nothing; it needs as much memory as the base. A load without a path is the base under another ID.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from reef.errors import EngineError
from reef.inference.local.lora import Adapter, AdapterStack, read_adapter, stack_adapters
from reef.inference.local.model import ModelSpec, ModelWeights
from reef.inference.local.ops import Ops
from reef.inference.local.slices import Slices, whole
from reef.inference.local.weights import build_weights, projection_parts, read_config, read_state
from reef.runtime.interfaces import BASE_LOAD_ID, WeightKind, WeightLoad

_STACKS = 8


@dataclass(slots=True, frozen=True)
class Load:
    content_id: str
    weights: ModelWeights
    adapter: Adapter | None = None


class Loads:
    """Reads the base at construction. At most `max_loads` sets of other bytes are resident, whatever IDs they have."""

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        max_loads: int,
        base_content_id: str,
    ) -> None:
        self._path = path
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._ops = ops
        self._max_loads = max_loads
        self._base_content_id = base_content_id
        self._resident: dict[str, Load] = {}
        self._staging: WeightLoad | None = None  # what is being read, until it is resident, dropped or released
        self._stacks: OrderedDict[tuple[str, ...], AdapterStack] = OrderedDict()
        self.restore()

    def __contains__(self, load_id: str) -> bool:
        return load_id in self._resident

    def __getitem__(self, load_id: str) -> Load:
        return self._resident[load_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._resident)

    def content_ids(self) -> dict[str, str]:
        return {load_id: load.content_id for load_id, load in self._resident.items()}

    def stage(self, load: WeightLoad) -> Slices[None]:
        """Raises EngineError; then nothing has changed. What is resident already is left alone. One at a time."""
        if (present := self._resident.get(load.runtime_load_id)) is not None:
            if present.content_id != load.content_id:
                raise EngineError(
                    f"{load.runtime_load_id} is resident with content {present.content_id}, not {load.content_id}"
                )
            return
        if not self._resident:
            raise EngineError("the engine's memory is released: restore it first")
        if (
            twin := next((one for one in self._resident.values() if one.content_id == load.content_id), None)
        ) is not None:
            self._resident[load.runtime_load_id] = twin  # the same bytes under another ID: nothing is read
            return
        base = self._resident[BASE_LOAD_ID]
        if load.path is None:
            self._resident[load.runtime_load_id] = Load(load.content_id, base.weights)
            return
        others = {one.content_id for one in self._resident.values() if one.adapter or one.weights is not base.weights}
        if len(others) >= self._max_loads:
            raise EngineError(f"resident loads must be <= max-loads ({self._max_loads}): drop one first")
        path = Path(load.path)
        if not path.is_dir():
            raise EngineError(f"{load.runtime_load_id}: there is no directory at its path")
        self._staging = load
        if load.kind is WeightKind.LORA:
            staged = Load(load.content_id, base.weights, (yield from self._read_adapter(path)))
        else:
            staged = Load(load.content_id, (yield from self._read_full(path)))
        if self._staging is not load:  # and the base may be another by now
            raise EngineError(f"{load.runtime_load_id} was dropped or memory was released while it was being staged")
        self._resident[load.runtime_load_id] = staged
        self._staging = None

    def drop(self, load_id: str) -> None:
        if self._staging is not None and self._staging.runtime_load_id == load_id:
            self._staging = None
        self._resident.pop(load_id, None)
        for key in [key for key in self._stacks if load_id in key]:
            del self._stacks[key]

    def release(self) -> None:
        """Free everything, the base too."""
        self._staging = None
        self._resident.clear()
        self._stacks.clear()
        self._ops.release()

    def restore(self) -> None:
        """Read the base again. Other loads have to be staged again."""
        if not self._resident:
            self._resident[BASE_LOAD_ID] = Load(self._base_content_id, whole(self._build(self._path)))

    def stack(self, load_ids: tuple[str, ...]) -> AdapterStack:
        """The adapters of `load_ids` side by side. Recent ones are kept."""
        stack = self._stacks.pop(load_ids, None)
        if stack is None:
            adapters = [self._resident[load_id].adapter for load_id in load_ids]
            stack = stack_adapters([adapter for adapter in adapters if adapter is not None])
        self._stacks[load_ids] = stack
        while len(self._stacks) > _STACKS:
            self._stacks.popitem(last=False)
        return stack

    def _read_adapter(self, path: Path) -> Slices[Adapter]:
        return read_adapter(
            path,
            num_layers=self._spec.num_layers,
            fused_sizes=self._spec.fused_sizes,
            parts=projection_parts(self._spec),
            dtype=self._dtype,
            device=self._device,
        )

    def _read_full(self, path: Path) -> Slices[ModelWeights]:
        if (path / "config.json").exists() and ModelSpec.from_config(read_config(path)) != self._spec:
            raise EngineError("the weights' config.json describes another architecture than the base model's")
        return self._build(path)

    def _build(self, path: Path) -> Slices[ModelWeights]:
        state = yield from read_state(path)
        return (yield from build_weights(state, self._spec, self._dtype, self._device, self._ops))
