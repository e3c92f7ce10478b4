"""Whether SGLang keys its prefix cache by adapter: asked of SGLang itself, where it can be imported.

The checks are part of Reef's plugin, because a running engine answers them about itself (`/reef/state`).
"""

from __future__ import annotations

from reef.inference.sglang.plugin.reef_sglang.lora_schema import (
    adapter_scoped_prefix_cache_supported,
    version_keyed_prefix_cache_supported,
)

__all__ = ["adapter_scoped_prefix_cache_supported", "version_keyed_prefix_cache_supported"]
