"""One request inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reef.inference.chat.detokenizer import TextStream
from reef.inference.local.grammar import GrammarState
from reef.inference.local.kv_cache import Node
from reef.runtime.interfaces import Ending, GenerateRequest


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
    num_lost: int = 0  # tokens that had KV when the request was last sent back to the queue
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    mixed: bool = False  # its KV is of more than one load, so it must not enter the prefix cache
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache when it was first admitted
    output_counts: npt.NDArray[np.int32] | None = None  # [vocab], only with penalties
    grammar: GrammarState | None = None  # once it is compiled

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

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        if self.output_counts is not None:
            self.output_counts[token_id] += 1
        if self.grammar is not None:
            self.grammar.accept(token_id)

    def ending_after(self, token_id: int) -> tuple[Ending | None, str | None]:
        """How the request ends with its newest token, if it does, and the stop string that matched."""
        if token_id in self.end_ids:
            return Ending.STOP, None
        if self.text is not None:
            self.text.push(token_id)
            if self.text.stopped_by is not None:
                return Ending.STOP, self.text.stopped_by
        if self.grammar is not None and self.grammar.finished:
            return Ending.STOP, None
        return (Ending.LENGTH if self.num_output >= self.request.sampling.max_tokens else None), None
