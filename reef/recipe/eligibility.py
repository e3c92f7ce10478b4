"""Which recorded answers may train: pure functions that give an answer's index, or why not."""

from __future__ import annotations

import math
from typing import NamedTuple

from reef.runtime.interfaces import Disposition, Ending, Generation, InferenceRecord


class Refusal(NamedTuple):
    """Why something never trains. `kind` is a stable word to count by; `reason` is for people."""

    kind: str
    disposition: Disposition
    reason: str


_ENDINGS = {
    Ending.CLIENT_LEFT: "the client left in mid-answer",
    Ending.ENGINE_CUT: "the engine was cut off in mid-answer",
}


def refuse_record(record: InferenceRecord, train_on_length: bool) -> Refusal | None:
    """The reason why no answer of this record can train, or None."""
    refusals = [refuse_generation(generation, train_on_length) for generation in record.generations]
    if refusals and None not in refusals:
        return refusals[0]
    if record.status != 200:
        return Refusal("status", Disposition.INELIGIBLE, f"the request ended with status {record.status}")
    if not record.generations:
        return Refusal("no_generations", Disposition.INELIGIBLE, "no token ids were captured (provider traffic)")
    return None


def refuse_generation(generation: Generation, train_on_length: bool) -> Refusal | None:
    """The reason why this answer can never train, or None."""
    if not generation.ending.complete:
        return Refusal(generation.ending.value, Disposition.INCOMPLETE, _ENDINGS[generation.ending])
    if generation.ending is Ending.LENGTH and not train_on_length:
        return Refusal("stopped_by_length", Disposition.INELIGIBLE, "stopped by length, and train-on-length is false")
    if not generation.output_ids:
        return Refusal("no_output", Disposition.INELIGIBLE, "the answer has no tokens")
    if len(generation.logprobs) != len(generation.output_ids) or not all(map(math.isfinite, generation.logprobs)):
        return Refusal("no_logprobs", Disposition.INELIGIBLE, "not every token has a finite log-probability")
    return None


def choose(record: InferenceRecord, choice: int | None, train_on_length: bool) -> int | Refusal:
    """Index of the answer that a report with this `metadata.choice` scores."""
    answers = len(record.generations)
    if choice is None and answers > 1:
        reason = f"ambiguous choice: the request has {answers} answers and the report no metadata.choice"
        return Refusal("ambiguous_choice", Disposition.INELIGIBLE, reason)
    index = choice or 0
    if index >= answers:
        reason = f"metadata.choice must be < {answers}, the number of answers, got {index}"
        return Refusal("unknown_choice", Disposition.INELIGIBLE, reason)
    return refuse_generation(record.generations[index], train_on_length) or index
