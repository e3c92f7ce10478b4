"""Recorded log-probabilities against the weights that their spans name, by transformers and peft alone, in float32."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from crash.model import token_of_byte

TOLERANCE = 1e-4
KEPT_MODELS = 12

Release = dict[str, Any]


class Rescorer:
    """Weights by content id, read from the data directory of the deployment."""

    def __init__(self, model: Path, data: Path) -> None:
        torch.set_num_threads(1)
        logging.disable_progress_bar()
        self._model = model
        self._contents = data / "artifacts" / "contents"
        self._models: OrderedDict[str, Any] = OrderedDict()
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._token_of_byte = token_of_byte()
        self.answers = 0
        self.mixed = 0
        self.fragments = 0
        self.worst = 0.0

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
        done, cache, first = 0, None, 0
        while done < len(output):
            best = (0, None, first)
            for index in range(first, len(releases)):
                model = self._weights(releases[index]["content_id"])
                for before in [cache, None] if cache is not None else [None]:
                    matched, after = self._matched(model, ids, len(prompt), done, expected, before)
                    if matched > best[0]:
                        best = (matched, after, index)
            if best[0] == 0:
                return f"token {done} of {len(output)} has the log-probability of no committed release"
            done, (_, cache, first) = done + best[0], best
        return None

    def _matched(
        self, model: Any, ids: torch.Tensor, prompt: int, done: int, expected: torch.Tensor, cache: Any
    ) -> tuple[int, Any]:
        """How many tokens from `done` on this model explains, and the cache up to the last of them."""
        again, _ = self._forward(model, ids, prompt + done, ids.shape[1], cache)
        wrong = ((again - expected[done:]).abs() > TOLERANCE).nonzero()
        matched = int(wrong[0]) if len(wrong) else len(again)
        if matched == 0:
            return 0, None
        _, after = self._forward(model, ids, prompt + done, prompt + done + matched, cache)
        return matched, after

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
            model = self._read(self._contents / content_id)
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
