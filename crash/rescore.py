"""Recorded log-probabilities, and those that a client saw, against the weights of the releases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from crash.model import token_of_byte
from reef.artifact.content import contents_of
from reef.runtime.interfaces import Span
from reef.verify.reference import Reference, Weights

TOLERANCE = 1e-4
ROUNDINGS = 8.0
"""How many times as far as the double-precision reference itself goes when its weights are rounded to float32 anew."""
ROUNDED = 8  # times
EARLIER = 4
"""Tokens before the last match of some weights, at each of which the next ones may have begun."""
TRIES = 400

Release = dict[str, Any]


class Rescorer:
    """Weights by content id, read from the data directory of the deployment."""

    def __init__(self, model: Path, data: Callable[[], Path]) -> None:
        torch.set_num_threads(1)
        self._model = model
        self._data = data  # asked when the deployment runs
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._token_of_byte = token_of_byte()
        self.answers = 0
        self.mixed = 0
        self.fragments = 0
        self.worst = 0.0
        self.ill_conditioned = 0  # answers with a token beyond the tolerance that rounding accounts for
        self._tries = 0

    @cached_property
    def _reference(self) -> Reference:
        contents = contents_of(self._data() / "artifacts")
        return Reference(self._model, contents, tolerance=TOLERANCE, dtype=torch.float64)

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
            if difference <= TOLERANCE:
                continue
            allowed = ROUNDINGS * self._rounding(weights[span.runtime_load_id].content_id, generation, span)
            if not bool((score.differences <= allowed.clamp(min=TOLERANCE)).all()):
                return f"tokens {span.start} to {span.end} are {difference:.6f} nat off {span.runtime_load_id}"
            self.ill_conditioned += 1
        return None

    @torch.inference_mode()
    def _rounding(self, content_id: str, generation: dict[str, Any], span: Span) -> torch.Tensor:
        """How far each token of the span moves (root mean square) when every weight moves by float32's precision."""
        prompt, output = generation["prompt_ids"], generation["output_ids"]
        ids = torch.tensor([[*prompt, *output[: span.end]]])
        rows = slice(len(prompt) + span.start, len(prompt) + span.end)
        exact, _ = self._reference.logprobs(content_id, ids, rows)
        state = {
            name: value for name, value in self._reference.model(content_id).state_dict().items()
            if value.is_floating_point()
        }  # fmt: skip
        kept = {name: value.clone() for name, value in state.items()}
        noise, moved = torch.Generator().manual_seed(0), torch.zeros_like(exact)
        try:
            for _ in range(ROUNDED):
                for name, value in state.items():
                    shift = torch.randn(value.shape, generator=noise, dtype=value.dtype)
                    value.copy_(kept[name] * (1 + 2.0**-24 * shift))
                moved += (self._reference.logprobs(content_id, ids, rows)[0] - exact).square()
        finally:
            for name, value in state.items():
                value.copy_(kept[name])
        return (moved / ROUNDED).sqrt()

    def fragment(self, question: str, tokens: Sequence[tuple[int, float]], releases: Sequence[Release]) -> str | None:
        """None if some chain of these releases (oldest first) explains what a client saw of a stream.

        Nothing was recorded of it, so neither spans nor ids are known; the vocabulary of bytes gives the ids.
        """
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        output = [self._token_of_byte[byte] for byte, _ in tokens]
        ids = torch.tensor([[*prompt, *output]])
        expected = torch.tensor([logprob for _, logprob in tokens], dtype=torch.float64)
        self.fragments += 1
        self._tries = TRIES
        reached = self._explained(
            [release["content_id"] for release in releases], ids, len(prompt), 0, expected, cache=None
        )
        if reached < len(output):
            return f"token {reached} of {len(output)} has the log-probability of no committed release"
        return None

    def _explained(
        self, contents: Sequence[str], ids: torch.Tensor, prompt: int, done: int, expected: torch.Tensor, cache: Any
    ) -> int:
        """How many tokens a chain of `contents` explains that has explained `done` already.

        A token that two of them like equally may be the first of the second one, so a switch is tried a little earlier
        than the first one's last match, too: the keys and values that follow depend on it.
        """
        furthest = done
        for index, content_id in enumerate(contents):
            for before in [cache, None] if cache is not None else [None]:
                self._tries -= 1
                matched = self._matched(content_id, ids, prompt, done, expected, before)
                furthest = max(furthest, done + matched)
                for length in range(matched, max(0, matched - EARLIER), -1):
                    if furthest == len(expected) or self._tries < 0:
                        return furthest
                    rows = slice(prompt + done, prompt + done + length)
                    _, after = self._reference.logprobs(content_id, ids, rows, before, keep=True)
                    reached = self._explained(contents[index:], ids, prompt, done + length, expected, after)
                    furthest = max(furthest, reached)
        return furthest

    def _matched(
        self, content_id: str, ids: torch.Tensor, prompt: int, done: int, expected: torch.Tensor, cache: Any
    ) -> int:
        """How many tokens from `done` on these weights explain."""
        again, _ = self._reference.logprobs(content_id, ids, slice(prompt + done, ids.shape[1]), cache)
        wrong = ((again - expected[done:]).abs() > TOLERANCE).nonzero()
        return int(wrong[0]) if len(wrong) else len(again)
