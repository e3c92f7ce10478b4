"""Recorded log-probabilities against the weights that their spans name, by transformers and peft alone, in float32."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from crash.model import token_of_byte

TOLERANCE = 1e-4
KEPT_MODELS = 12
EARLIER = 4
"""Tokens before a model's last match, at each of which the next model may have begun."""
TRIES = 400

Release = dict[str, Any]


class Rescorer:
    """Weights by content id, read from the data directory of the deployment."""

    def __init__(self, model: Path, data: Callable[[], Path]) -> None:
        torch.set_num_threads(1)
        logging.disable_progress_bar()
        self._model = model
        self._data = data
        self._models: OrderedDict[str, Any] = OrderedDict()
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._token_of_byte = token_of_byte()
        self.answers = 0
        self.mixed = 0
        self.fragments = 0
        self.worst = 0.0
        self._tries = 0

    def generation(self, generation: dict[str, Any], releases: dict[str, Release]) -> str | None:
        """None if every token has the log-probability that its span's release gives it, else what is wrong.

        `releases` are the scenario's by runtime load ID. Across a switch, tokens are compared both with the keys and
        values of before (`in_place`) and with recomputed ones (`retract`, or a request that had to start again).
        """
        ids = torch.tensor([generation["prompt_ids"] + generation["output_ids"]])
        prompt = len(generation["prompt_ids"])
        cache: Any = None
        self.answers += 1
        self.mixed += len(generation["spans"]) > 1
        for span in generation["spans"]:
            model = self._weights(releases[span["runtime_load_id"]]["content_id"])
            start, end = prompt + span["start"], prompt + span["end"]
            expected = torch.tensor(generation["logprobs"][span["start"] : span["end"]])
            difference, cache = min(
                (
                    (self._difference(model, ids, start, end, expected, candidate))
                    for candidate in ([cache, None] if cache is not None else [None])
                ),
                key=lambda found: found[0],
            )
            self.worst = max(self.worst, difference)
            if not difference <= TOLERANCE:
                return f"tokens {span['start']} to {span['end']} are {difference:.6f} nat off {span['runtime_load_id']}"
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
        models = [self._weights(release["content_id"]) for release in releases]
        self._tries = TRIES
        reached = self._explained(models, ids, len(prompt), 0, expected, None)
        if reached < len(output):
            return f"token {reached} of {len(output)} has the log-probability of no committed release"
        return None

    def _explained(
        self, models: Sequence[Any], ids: torch.Tensor, prompt: int, done: int, expected: torch.Tensor, cache: Any
    ) -> int:
        """How many tokens a chain of `models` explains that has explained `done` already.

        A token that two models like equally may be the first of the second one, so a switch is tried a little earlier
        than the first model's last match, too: the keys and values that follow depend on it.
        """
        furthest = done
        for index, model in enumerate(models):
            for before in [cache, None] if cache is not None else [None]:
                self._tries -= 1
                matched = self._matched(model, ids, prompt, done, expected, before)
                furthest = max(furthest, done + matched)
                for length in range(matched, max(0, matched - EARLIER), -1):
                    if furthest == len(expected) or self._tries < 0:
                        return furthest
                    _, after = self._forward(model, ids, prompt + done, prompt + done + length, before)
                    reached = self._explained(models[index:], ids, prompt, done + length, expected, after)
                    furthest = max(furthest, reached)
        return furthest

    def _matched(
        self, model: Any, ids: torch.Tensor, prompt: int, done: int, expected: torch.Tensor, cache: Any
    ) -> int:
        """How many tokens from `done` on this model explains."""
        again, _ = self._forward(model, ids, prompt + done, ids.shape[1], cache)
        wrong = ((again - expected[done:]).abs() > TOLERANCE).nonzero()
        return int(wrong[0]) if len(wrong) else len(again)

    def _difference(
        self, model: Any, ids: torch.Tensor, start: int, end: int, expected: torch.Tensor, cache: Any
    ) -> tuple[float, Any]:
        again, after = self._forward(model, ids, start, end, cache)
        return (again - expected).abs().max().item(), after

    def _forward(self, model: Any, ids: torch.Tensor, start: int, end: int, cache: Any) -> tuple[torch.Tensor, Any]:
        """Log-probabilities of ids[start:end], and the keys and values of ids[: end - 1].

        `cache` holds those of ids[: start - 1], or is None.
        """
        cache = copy.deepcopy(cache)
        begin = 0 if cache is None else start - 1
        with torch.no_grad():
            result = model(input_ids=ids[:, begin : end - 1], past_key_values=cache, use_cache=True)
        rows = torch.log_softmax(result.logits[0, start - 1 - begin :].float(), dim=-1)
        return rows.gather(1, ids[0, start:end, None])[:, 0], result.past_key_values

    def _weights(self, content_id: str) -> Any:
        model = self._models.pop(content_id, None)
        if model is None:
            model = self._read(self._data() / "artifacts" / "contents" / content_id)
        self._models[content_id] = model
        while len(self._models) > KEPT_MODELS:
            self._models.popitem(last=False)
        return model

    def _read(self, content: Path) -> Any:
        """A directory that does not exist is the base model's content."""
        if (content / "adapter_config.json").exists():
            from peft import PeftModel

            base = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)
            return PeftModel.from_pretrained(base, content).eval()
        source = content if content.exists() else self._model
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
