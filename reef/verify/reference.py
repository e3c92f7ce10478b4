"""Log-probabilities again, by transformers and peft alone: nothing here is shared with an engine or a trainer.

A request that a publication froze goes on with keys and values of older weights. So spans are re-scored in order, each
on the cache that the ones before left; where an engine computed everything anew (`retract`, a request that had to give
way, one that had no output yet) the cache is the span's own. What the spans do not say is found by trying: at which
token of a span, if any, the frozen cache was given up.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reef.errors import VerificationError
from reef.inference.source import model_source
from reef.runtime.interfaces import Span

_KEPT_MODELS = 2  # complete sets of weights besides the base
_KEPT_ADAPTERS = 32
_ADAPTER_FILE = "adapter_config.json"


@dataclass(slots=True, frozen=True)
class Weights:
    """What a span was generated with. `frozen` says whether it may rest on keys and values of the span before."""

    content_id: str
    frozen: bool = True


@dataclass(slots=True)
class SpanScore:
    """One span again. `differences` are |recorded - re-scored| in nats, [num_tokens]."""

    differences: Tensor
    frozen: int = 0  # tokens, from the span's first on, that rest on keys and values of older weights


class Reference:
    """Weights by content id below `contents`; the id `base_id` is the model itself."""

    def __init__(
        self,
        model: Path,
        contents: Path,
        base_id: str | None = None,
        *,
        tolerance: float = 1e-4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Load the base. Without `base_id`, any id that has no directory is the base.

        In float64 nothing of the difference is this class's own rounding (seen in float32: up to 6e-5 nat).
        """
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._source, self._options = model_source(model)
        self.contents = contents
        self._base_id = base_id
        self._tolerance = tolerance  # nats; decides only which caches are carried on
        self._dtype = dtype
        self._base = self._load(self._source, self._options)
        self._adapted: Any = None  # the base with adapters, once there is one
        self._adapters: OrderedDict[str, None] = OrderedDict()
        self._models: OrderedDict[str, Any] = OrderedDict()

    def rescore(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[Span],
        weights: Mapping[str, Weights],
    ) -> list[SpanScore]:
        """Score the output, span by span; `weights` are by runtime load ID. Raises VerificationError."""
        ids = torch.tensor([[*prompt_ids, *output_ids]])
        recorded = torch.tensor(logprobs, dtype=self._dtype)
        caches: list[Any] = []
        scores = []
        for number, span in enumerate(spans):
            rows = slice(len(prompt_ids) + span.start, len(prompt_ids) + span.end)
            used = weights[span.runtime_load_id]
            more = number + 1 < len(spans)
            score, caches = self._span(
                used.content_id, ids, rows, recorded[span.start : span.end], caches if used.frozen else [], more
            )
            scores.append(score)
        return scores

    def _span(
        self, content_id: str, ids: Tensor, rows: slice, recorded: Tensor, caches: list[Any], more: bool
    ) -> tuple[SpanScore, list[Any]]:
        """The best explanation of one span, and the caches that the next may go on with."""
        again, own = self.logprobs(content_id, ids, rows, keep=more)
        anew = (again - recorded).abs()
        best, carried = SpanScore(anew), [(anew, own)]
        for cache in caches:
            again, after = self.logprobs(content_id, ids, rows, cache, keep=more)
            frozen = (again - recorded).abs()
            candidate = _joined(frozen, anew)
            if candidate.differences.sum() < best.differences.sum():
                best = candidate
            carried.append((frozen, after))
        fitting = [cache for differences, cache in carried if differences[-1] <= self._tolerance]
        return best, fitting or [min(carried, key=lambda one: one[0][-1].item())[1]]

    def logprobs(
        self, content_id: str, ids: Tensor, rows: slice, cache: Any = None, *, keep: bool = False
    ) -> tuple[Tensor, Any]:
        """Of ids[rows], given ids [1, num_tokens]; and with `keep` the keys and values of ids[: rows.stop - 1].

        `cache` holds those of ids[: rows.start - 1] and is left as it is; without one everything is computed.
        """
        cache = copy.deepcopy(cache)
        begin = 0 if cache is None else rows.start - 1
        count = rows.stop - rows.start
        with torch.inference_mode():
            result = self.model(content_id)(
                input_ids=ids[:, begin : rows.stop - 1],
                past_key_values=cache,
                use_cache=keep or cache is not None,
                logits_to_keep=count,
            )
        table = torch.log_softmax(result.logits[0].to(self._dtype), dim=-1)
        return table.gather(1, ids[0, rows, None])[:, 0], result.past_key_values if keep else None

    def model(self, content_id: str) -> Any:
        """The weights as a transformers model, until the next call. Raises VerificationError if they are not there."""
        content = self.contents / content_id
        if content_id == self._base_id or (self._base_id is None and not content.is_dir()):
            if self._adapted is not None:
                self._adapted.base_model.disable_adapter_layers()
            return self._base
        if not content.is_dir():
            raise VerificationError(f"content {content_id} is not in {self.contents}")
        if (content / _ADAPTER_FILE).exists():
            return self._adapter(content)
        return self._full(content)

    def _adapter(self, content: Path) -> Any:
        """One base carries every adapter; one of them is switched on."""
        name = f"content-{content.name}"
        if self._adapted is None:
            from peft import PeftModel

            self._adapted = PeftModel.from_pretrained(self._base, content, adapter_name=name).eval()
        elif name not in self._adapters:
            self._adapted.load_adapter(content, adapter_name=name)
        if name not in self._adapters:
            self._adapted.to(self._dtype)
        self._adapters[name] = None
        self._adapters.move_to_end(name)
        self._adapted.set_adapter(name)
        self._adapted.base_model.enable_adapter_layers()
        while len(self._adapters) > _KEPT_ADAPTERS:
            self._adapted.delete_adapter(self._adapters.popitem(last=False)[0])
        return self._adapted

    def _full(self, content: Path) -> Any:
        model = self._models.pop(content.name, None)
        if model is None:
            while len(self._models) >= _KEPT_MODELS:
                self._models.popitem(last=False)
            model = self._load(content, {})
        self._models[content.name] = model
        return model

    def _load(self, source: Path, options: Mapping[str, str]) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(source, **options, dtype=self._dtype).eval()


def _joined(frozen: Tensor, anew: Tensor) -> SpanScore:
    """On the frozen cache up to where it was given up, wherever that explains the span best. [num_tokens] each."""
    start = frozen.new_zeros(1)
    given_up = int((torch.cat((start, frozen.cumsum(0))) + anew.sum() - torch.cat((start, anew.cumsum(0)))).argmin())
    return SpanScore(torch.cat((frozen[:given_up], anew[given_up:])), given_up)
