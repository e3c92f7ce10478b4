"""The section "inference" of a deployment that serves with SGLang, and its decision about prefix sharing.

A cached KV entry must never serve a request under other weights. SGLang's cache knows nothing of weights, so there are
two ways: publish only through barriers that retract and flush, or let Reef's plugin put the runtime load ID into every
entry's key. Under LoRA, entries must be kept apart by adapter in either case. Importing this imports no SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from reef.errors import ConfigError
from reef.inference.chat.formats import ReasoningFormatKey, ToolFormatKey
from reef.inference.headers import HeaderProvidersKey
from reef.runtime.interfaces import PauseMode

Option = bool | int | float | str | list[str]

DISABLE = "disable-radix-cache"
STACKS = {
    frozenset({"q_proj", "k_proj", "v_proj"}): frozenset({"q_proj", "v_proj"}),
    frozenset({"gate_proj", "up_proj"}): frozenset({"gate_proj", "up_proj"}),
}
"""Layers that SGLang 0.5.23 makes one, and which of them an adapter of any of them must have (its lora/lora.py).

It reads an adapter with fewer, and dies of it at the first request.
"""

OWNED = {
    "model-path": "inference.model-path",
    "model": "inference.model-path",
    "served-model-name": "inference.served-model-name",
    "dtype": "inference.dtype",
    "device": "inference.device",
    "context-length": "inference.max-context",
    "tp": "inference.tensor-parallel-size",
    "tp-size": "inference.tensor-parallel-size",
    "tensor-parallel-size": "inference.tensor-parallel-size",
    "max-lora-rank": "inference.max-lora-rank",
    "max-loras-per-batch": "inference.max-loads",
    "lora-target-modules": "inference.lora-target-modules",
}
"""SGLang's flags that have a key of Reef's own."""

RESERVED = (
    "host",
    "port",
    "weight-version",
    "enable-lora",
    "lora-paths",
    "max-loaded-loras",
    "incremental-streaming-output",
    "skip-tokenizer-init",
    "tokenizer-worker-num",
    "dp",
    "dp-size",
    "data-parallel-size",
    "nnodes",
    "disaggregation-mode",
    "api-key",
    "admin-api-key",
)
"""SGLang's flags that Reef sets, or could not work with."""


class EngineGroup(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Some equal engines; `options` are added to `inference.options`."""

    engines: Annotated[int, msgspec.Meta(ge=1)] = 1
    role: Literal["regular", "prefill", "decode"] = "regular"
    options: dict[str, Option] = {}


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether an engine shares prefixes, and why. `version_keys`: entries must carry the runtime load ID."""

    prefix_cache: bool
    version_keys: bool
    reason: str


class SGLangConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """SGLang engines that Reef starts, or external ones at `endpoints`."""

    model_path: Annotated[str, msgspec.Meta(min_length=1, description="model directory (safetensors)")]
    backend: Annotated[Literal["sglang"], msgspec.Meta(description="SGLang engines")] = "sglang"
    served_model_name: Annotated[
        str | None, msgspec.Meta(description="model name that clients see; default: the directory's name")
    ] = None
    tool_format: ToolFormatKey = "auto"
    reasoning_format: ReasoningFormatKey = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], msgspec.Meta(description="of the weights in the engine")
    ] = "auto"
    device: Annotated[
        Literal["cuda", "cpu"],
        msgspec.Meta(description="cpu: Reef's platform plugin for SGLang, for development and CI only"),
    ] = "cuda"
    engines: Annotated[int, msgspec.Meta(ge=1, description="how many engines serve, behind SGLang's router")] = 1
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, description="GPUs that one engine spans")] = 1
    num_gpus: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        msgspec.Meta(description="GPUs of all engines together; default: engines x tensor-parallel-size"),
    ] = None
    groups: Annotated[
        list[EngineGroup], msgspec.Meta(description="engines with options of their own, in place of `engines`")
    ] = []
    endpoints: Annotated[
        list[str], msgspec.Meta(description="external engines, http://host:port: verified, used, never stopped")
    ] = []
    options: Annotated[
        dict[str, Option], msgspec.Meta(description="SGLang's own flags without dashes in front, for every engine")
    ] = {}
    pause_mode: Annotated[
        PauseMode | None,
        msgspec.Meta(
            description="what a publication does to requests in flight; default: retract where engines are colocated "
            "or training.options.disjoint-prefix-sharing is set, else in_place"
        ),
    ] = None
    version_keys: Annotated[
        bool, msgspec.Meta(description="let Reef's plugin key cached prefixes by runtime load ID")
    ] = True
    max_context: Annotated[int, msgspec.Meta(ge=0, description="most tokens of one request; 0: the model's own")] = 0
    max_loads: Annotated[
        int, msgspec.Meta(ge=2, description="adapters resident at once: one per trained scenario, one to publish")
    ] = 8
    max_lora_rank: Annotated[int, msgspec.Meta(ge=1, description="largest rank of an adapter")] = 16
    lora_target_modules: Annotated[
        tuple[str, ...], msgspec.Meta(min_length=1, description="names of the linear layers that adapters may change")
    ] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    python: Annotated[
        str, msgspec.Meta(description="interpreter with SGLang; empty: the one that `make engine-sglang` built")
    ] = ""
    handler_factory: Annotated[
        str, msgspec.Meta(description="package.module:Class of your own InferenceHandler; empty: the backend's")
    ] = ""
    handler_config: Annotated[
        dict[str, Any],
        msgspec.Meta(description="settings of the handler; of the backend's own: connect-timeout"),
    ] = msgspec.field(default_factory=dict)
    header_providers: HeaderProvidersKey = []
    start_timeout: Annotated[float, msgspec.Meta(gt=0, description="seconds that an engine may take to start")] = 600.0
    control_timeout: Annotated[
        float, msgspec.Meta(gt=0, description="seconds within which an engine must answer a control call")
    ] = 300.0

    def __post_init__(self) -> None:
        for where, options in self._all_options():
            _check_options(where, options)
        if self.groups and (self.engines != 1 or self.endpoints):
            raise ValueError("groups takes the place of engines and endpoints: set one of them")
        if self.endpoints and self.engines != 1:
            raise ValueError(f"engines is for engines that Reef starts, got {self.engines} with endpoints")
        for endpoint in self.endpoints:
            if not endpoint.startswith("http://"):
                raise ValueError(f"endpoints must be http://host:port, got {endpoint!r}")
        wanted = self.num_engines * self.tensor_parallel_size
        if self.num_gpus is not None and self.device == "cuda" and not self.endpoints and self.num_gpus != wanted:
            raise ValueError(f"num-gpus must be engines x tensor-parallel-size ({wanted}), got {self.num_gpus}")
        if self.device == "cpu" and (self.tensor_parallel_size > 1 or self.num_gpus):
            raise ValueError("device cpu has no GPUs: leave num-gpus and tensor-parallel-size alone")
        for number, group in enumerate(self.groups):
            if group.role != "regular":
                raise ValueError(
                    f"groups[{number}].role must be regular, got {group.role}: SGLang's scheduler cannot retract "
                    "disaggregated requests, and Reef starts no prefill or decode engines"
                )

    @property
    def model_name(self) -> str:
        """The name that clients see."""
        return self.served_model_name or Path(self.model_path).resolve().name

    @property
    def num_engines(self) -> int:
        return len(self.endpoints) or sum(group.engines for group in self.groups) or self.engines

    def engine_options(self) -> list[dict[str, Option]]:
        """SGLang's flags of each engine that Reef starts."""
        groups = self.groups or [EngineGroup(engines=self.engines)]
        return [{**self.options, **group.options} for group in groups for _ in range(group.engines)]

    def pausing(self, *, colocated: bool, disjoint_prefix_sharing: bool) -> PauseMode:
        """How publications pause. Raises ConfigError where what was set contradicts the rest."""
        derived = PauseMode.RETRACT if colocated or disjoint_prefix_sharing else PauseMode.IN_PLACE
        if self.pause_mode is None:
            return derived
        if self.pause_mode is PauseMode.IN_PLACE and derived is PauseMode.RETRACT:
            why = "training.colocate is true" if colocated else "training.options.disjoint-prefix-sharing is true"
            raise ConfigError(f"inference.pause-mode must be retract, got in_place: {why}")
        return self.pause_mode

    def sharing(
        self,
        options: dict[str, Option],
        mode: PauseMode,
        *,
        lora: bool,
        adapter_scoped: bool,
        version_keyed: bool,
    ) -> Sharing:
        """Decide for one engine; the last two are what the engine found out about itself.

        Raises ConfigError if sharing was asked for (`disable-radix-cache: false`) where it is not safe.
        """
        asked = options.get(DISABLE)
        if asked is True:
            return Sharing(False, False, f"inference.options.{DISABLE} is true")
        keyed = self.version_keys and version_keyed
        if lora and not adapter_scoped:
            found = Sharing(False, False, "this SGLang does not keep cached prefixes of different adapters apart")
        elif keyed:
            found = Sharing(True, True, "cached prefixes are keyed by runtime load ID")
        elif mode is PauseMode.RETRACT:
            found = Sharing(True, False, "every publication retracts and flushes")
        else:
            why = "are not keyed by runtime load ID" if not self.version_keys else "cannot be keyed by runtime load ID"
            found = Sharing(False, False, f"publications pause in_place, and cached prefixes {why}")
        if asked is False and not found.prefix_cache:
            raise ConfigError(f"inference.options.{DISABLE} must not be false: {found.reason}")
        return found

    def _all_options(self) -> list[tuple[str, dict[str, Option]]]:
        groups = [(f"groups[{number}].options", group.options) for number, group in enumerate(self.groups)]
        return [("options", self.options), *groups]


def _check_options(where: str, options: dict[str, Option]) -> None:
    for name, value in options.items():
        if name != name.lower() or "_" in name or name.startswith("-"):
            raise ValueError(f"{where}: {name!r} must be written {name.lower().replace('_', '-').lstrip('-')!r}")
        if name in OWNED:
            raise ValueError(f"{where}.{name} is set by {OWNED[name]}")
        if name in RESERVED:
            raise ValueError(f"{where}.{name} is set by Reef")
        if name == DISABLE and not isinstance(value, bool):
            raise ValueError(f"{where}.{name} must be true or false, got {value!r}")


def flags(options: dict[str, Option]) -> list[str]:
    """Options as SGLang's command line: true is the bare flag, false is none."""
    found: list[str] = []
    for name, value in options.items():
        if value is False:
            continue
        found.append(f"--{name}")
        if isinstance(value, list):
            found += value
        elif value is not True:
            found.append(str(value))
    return found
