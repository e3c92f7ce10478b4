"""Recorded log-probabilities, and those that a client saw, against the weights of the releases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from crash.model import token_of_byte
from reef.artifact.content import contents_of
from reef.runtime.interfaces import Span
from reef.verify.reference import Reference, Weights

TOLERANCE = 1e-4

Release = dict[str, Any]


class Rescorer:
    """Weights by content id, read from the data directory of the deployment."""

    def __init__(self, model: Path, data: Path) -> None:
        torch.set_num_threads(1)
        self._reference = Reference(model, contents_of(data / "artifacts"), tolerance=TOLERANCE)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._token_of_byte = token_of_byte()
        self.answers = 0
        self.mixed = 0
        self.fragments = 0
        self.worst = 0.0

    def generation(self, generation: dict[str, Any], releases: dict[str, Release]) -> str | None:
        """None if every token has the log-probability that its span's release gives it, else what is wrong.

        `releases` are the scenario's by runtime load ID.
        """
        spans = [Span(span["start"], span["end"], span["runtime_load_id"]) for span in generation["spans"]]
        weights = {load_id: Weights(release["content_id"]) for load_id, release in releases.items()}
        scores = self._reference.rescore(
            generation["prompt_ids"], generation["output_ids"], generation["logprobs"], spans, weights
        )
        self.answers += 1
        self.mixed += len(spans) > 1
        for span, score in zip(spans, scores, strict=True):
            difference = score.differences.max().item()
            self.worst = max(self.worst, difference)
            if not difference <= TOLERANCE:
                return f"tokens {span.start} to {span.end} are {difference:.6f} nat off {span.runtime_load_id}"
        return None

    def fragment(self, question: str, tokens: Sequence[tuple[int, float]], releases: Sequence[Release]) -> str | None:
        """None if some chain of these releases (oldest first) explains what a client saw of a stream.

        Nothing was recorded of it, so neither spans nor ids are known; the vocabulary of bytes gives the ids.
        """
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        output = [self._token_of_byte[byte] for byte, _ in tokens]
        ids = torch.tensor([[*prompt, *output]])
        expected = torch.tensor([logprob for _, logprob in tokens])
        self.fragments += 1
        done, cache, first = 0, None, 0
        while done < len(output):
            best = (0, None, first)
            for index in range(first, len(releases)):
                content_id = releases[index]["content_id"]
                for before in [cache, None] if cache is not None else [None]:
                    matched, after = self._matched(content_id, ids, len(prompt), done, expected, before)
                    if matched > best[0]:
                        best = (matched, after, index)
            if best[0] == 0:
                return f"token {done} of {len(output)} has the log-probability of no committed release"
            done, (_, cache, first) = done + best[0], best
        return None

    def _matched(
        self, content_id: str, ids: torch.Tensor, prompt: int, done: int, expected: torch.Tensor, cache: Any
    ) -> tuple[int, Any]:
        """How many tokens from `done` on these weights explain, and the cache up to the last of them."""
        again, _ = self._reference.logprobs(content_id, ids, slice(prompt + done, ids.shape[1]), cache)
        wrong = ((again - expected[done:]).abs() > TOLERANCE).nonzero()
        matched = int(wrong[0]) if len(wrong) else len(again)
        if matched == 0:
            return 0, None
        explained = slice(prompt + done, prompt + done + matched)
        return matched, self._reference.logprobs(content_id, ids, explained, cache, keep=True)[1]
