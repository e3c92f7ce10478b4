"""The section "inference" of a deployment that serves with Reef's own engine. Importing this imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from reef.inference.chat.formats import ReasoningFormatKey, ToolFormatKey
from reef.runtime.interfaces import PauseMode


class LocalConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """One local engine, or `engines` equal ones."""

    model_path: Annotated[str, msgspec.Meta(min_length=1, description="model directory (safetensors), or a GGUF file")]
    backend: Annotated[Literal["local"], msgspec.Meta(description="Reef's own engine")] = "local"
    served_model_name: Annotated[
        str | None, msgspec.Meta(description="model name that clients see; default: the directory's name")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        msgspec.Meta(description="auto: bfloat16 if the checkpoint is 16-bit and the device computes in it"),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], msgspec.Meta(description="auto: cuda where there is one")] = (
        "auto"
    )
    threads: Annotated[int, msgspec.Meta(ge=0, description="CPU threads of one engine; 0: torch's default")] = 0
    page_size: Annotated[int, msgspec.Meta(ge=1, description="tokens in one page of the KV cache")] = 16
    kv_cache_tokens: Annotated[int, msgspec.Meta(ge=2, description="tokens the KV cache of one engine holds")] = 32768
    max_running: Annotated[int, msgspec.Meta(ge=1, description="most sequences that run at once")] = 64
    max_batch_tokens: Annotated[
        int, msgspec.Meta(ge=1, description="most tokens in one step; longer prompts are prefilled in chunks")
    ] = 512
    max_context: Annotated[
        int, msgspec.Meta(ge=0, description="most tokens, prompt plus output, of one request; 0: the model's own")
    ] = 0
    max_loads: Annotated[
        int,
        msgspec.Meta(
            ge=2,
            description="sets of weights resident besides the base model: one for each trained scenario and one to "
            "publish; adapters of older releases stay for a quick rollback while there is room",
        ),
    ] = 8
    prefix_cache: Annotated[
        bool, msgspec.Meta(description="share KV between requests; entries are keyed by runtime load ID")
    ] = True
    pause_mode: Annotated[
        PauseMode, msgspec.Meta(description="what a publication does to requests in flight: retract or in_place")
    ] = PauseMode.IN_PLACE
    grammar_max_bytes: Annotated[
        int, msgspec.Meta(ge=1, description="largest JSON schema, regular expression or list of choices, in bytes")
    ] = 256 * 1024
    grammar_queue: Annotated[
        int, msgspec.Meta(ge=1, description="most grammars that wait to be compiled; more are refused for a while")
    ] = 256
    grammar_timeout: Annotated[
        float, msgspec.Meta(gt=0, description="seconds that one grammar may take to compile")
    ] = 10.0
    kernels: Annotated[
        Literal["auto", "torch"],
        msgspec.Meta(description="auto: compile Reef's CPU kernels at first use where there is a C++ compiler"),
    ] = "auto"
    engines: Annotated[int, msgspec.Meta(ge=1, description="how many engines serve")] = 1
    tool_format: ToolFormatKey = "auto"
    reasoning_format: ReasoningFormatKey = "auto"
    num_gpus: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        msgspec.Meta(description="devices that the engines have together: one each, or 0; null: as device says"),
    ] = None
    tensor_parallel_size: Annotated[
        Literal[1], msgspec.Meta(description="devices that one engine's model is split over; the local engine: 1")
    ] = 1
    handler_factory: Annotated[
        str, msgspec.Meta(description="package.module:Class of your own InferenceHandler; empty: the backend's")
    ] = ""
    handler_config: Annotated[
        dict[str, Any],
        msgspec.Meta(
            description="settings of the handler; of the backend's own: max-in-flight, connect-timeout, and "
            "queue-timeout: seconds after which a request without a first token gets 503"
        ),
    ] = msgspec.field(default_factory=dict)
    health_timeout: Annotated[
        float, msgspec.Meta(gt=0, description="seconds without a sign of life after which an engine is replaced")
    ] = 10.0
    control_timeout: Annotated[
        float,
        msgspec.Meta(
            gt=0, description="seconds that an engine which is alive may take for one order: loading weights, pausing"
        ),
    ] = 120.0

    def __post_init__(self) -> None:
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max-batch-tokens must be >= max-running ({self.max_running}), got {self.max_batch_tokens}"
            )
        if self.kv_cache_tokens < 2 * self.page_size:
            raise ValueError(f"kv-cache-tokens must be >= 2 pages ({2 * self.page_size}), got {self.kv_cache_tokens}")
        if self.max_context > self.kv_cache_tokens - self.page_size:
            bound = self.kv_cache_tokens - self.page_size
            raise ValueError(f"max-context must be <= kv-cache-tokens - page-size ({bound}), got {self.max_context}")

        if self.num_gpus not in (None, 0, self.engines):
            raise ValueError(f"num-gpus must be 0 or one for each of the {self.engines} engines, got {self.num_gpus}")
        if self.num_gpus == 0 and self.device == "cuda":
            raise ValueError("num-gpus must be >= 1 with device cuda, got 0")
        if self.num_gpus and self.device == "cpu":
            raise ValueError(f"num-gpus must be 0 with device cpu, got {self.num_gpus}")

    @property
    def resolved_device(self) -> str:
        """`device`, as far as `num_gpus` decides what it leaves open."""
        if self.device != "auto" or self.num_gpus is None:
            return self.device
        return "cuda" if self.num_gpus else "cpu"
