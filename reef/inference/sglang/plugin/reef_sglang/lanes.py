"""Which weights a request gets: named by lane (`reef:lane:NAME`) or load (`reef:load:ID`) in its `lora_path`.

Reef puts one table; a request is resolved when it passes SGLang's pause gate, so whatever waited for a publication to
end gets what was published. A load that the table lacks is refused, never loaded again from somewhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

LANE, LOAD = "reef:lane:", "reef:load:"


@dataclass(slots=True)
class Table:
    """`lanes`: lane -> runtime load ID.

    `loads`: runtime load ID -> its `content_id`, its `adapter` (SGLang's name, or None), and `weights`, the load ID of
    the full weights it is or lies over.
    """

    lanes: dict[str, str] = field(default_factory=dict)
    loads: dict[str, dict[str, Any]] = field(default_factory=dict)
    default: str = ""  # the load of a lane that has none of its own

    def load(self, name: str) -> str | None:
        """The load that a request's `lora_path` names; None if the name is not Reef's."""
        if name.startswith(LANE):
            return self.lanes.get(name.removeprefix(LANE), self.default)
        return name.removeprefix(LOAD) if name.startswith(LOAD) else None


TABLE = Table()


def resolve(manager: Any, obj: Any) -> None:
    """Before `TokenizerManager._validate_and_resolve_lora`. Raises ValueError, which SGLang answers with 400."""
    if not isinstance(obj.lora_path, str) or (load := TABLE.load(obj.lora_path)) is None:
        return
    obj.lora_path = None  # a request that is refused holds no adapter
    known = TABLE.loads.get(load)
    if known is None:
        raise ValueError(f"reef: the load {load} is not resident")
    held = manager.config_value("weight_version")
    if not known["adapter"] and known["weights"] != held:
        raise ValueError(f"reef: the load {load} is not resident; this engine holds the full weights of {held}")
    obj.lora_path = known["adapter"]
    obj.reef_load, obj.reef_under = load, held


async def generate(original: Any, manager: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
    """Around `TokenizerManager.generate_request`: tell the load, and over which full weights it was resolved.

    Tokens that those weights produced are the load's; tokens of weights that replaced them since are theirs.
    """
    async for out in original(manager, obj, request):
        if hasattr(obj, "reef_load") and isinstance(out, dict) and "meta_info" in out:
            out["meta_info"]["reef_load"], out["meta_info"]["reef_under"] = obj.reef_load, obj.reef_under
        yield out


async def unload(original: Any, manager: Any, obj: Any, *args: Any) -> Any:
    """Around `TokenizerManager.unload_lora_adapter`: what is unloaded is forgotten, not loaded again when named."""
    result = await original(manager, obj, *args)
    if result.success:
        manager.lora_ref_cache.pop(obj.lora_name, None)
    return result
