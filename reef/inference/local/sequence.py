"""One request inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reef.inference.chat.detokenizer import TextStream
from reef.inference.local.kv_cache import Node
from reef.runtime.interfaces import GenerateRequest


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Prompt and output so far, how much of it has KV, and where.

    `nodes` are the prefix-cache nodes of the first pages; the pages after those belong to this sequence alone.
    """

    request: GenerateRequest
    arrival: int  # order of `add`; the youngest is retracted first
    seed: int
    end_ids: frozenset[int]
    load_id: str  # whose weights compute what comes next
    text: TextStream | None = None  # only with stop strings
    tokens: list[int] = field(default_factory=list)  # prompt, then output
    num_computed: int = 0  # tokens with KV
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    mixed: bool = False  # its KV is of more than one load, so it must not enter the prefix cache
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache when it was first admitted
    seen_output: npt.NDArray[np.int32] | None = None  # [vocab] counts, only with penalties

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens without KV; a sequence that decodes has one."""
        return len(self.tokens) - self.num_computed

    @property
    def pinned(self) -> bool:
        return self.request.runtime_load_id is not None
