"""Runs what the scheduler planned: one forward pass per weight set, adapters and base of a set together."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from reef.errors import EngineError
from reef.inference.local.attention import KVTensors, Stretch, plan_dense, plan_paged
from reef.inference.local.loads import Loads
from reef.inference.local.lora import LoraBatch
from reef.inference.local.model import Batch, Model
from reef.inference.local.scheduler import Work
from reef.inference.local.slices import Slices

_SCORE_ROWS = 16
"""Logits computed at once by `score`: [rows, V] of float32."""


class Runner:
    """Holds the memory of the KV cache; `kv` is None while it is released."""

    def __init__(self, model: Model, loads: Loads, *, num_pages: int, page_size: int) -> None:
        self._model = model
        self._loads = loads
        self._num_pages = num_pages
        self._page_size = page_size
        self.kv: KVTensors | None = None
        self.allocate()

    def allocate(self) -> None:
        spec = self._model.spec
        self.kv = None
        self.kv = KVTensors(
            num_layers=spec.num_layers,
            num_pages=self._num_pages,
            page_size=self._page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self._model.dtype,
            device=self._model.device,
        )

    def run(self, works: list[Work]) -> tuple[list[Work], Tensor | None]:
        """Compute the KV of all `works`. Return those that sample with their logits [B, V]; None without any."""
        groups: dict[int, list[Work]] = {}
        for work in works:
            groups.setdefault(id(self._loads[work.sequence.load_id].weights), []).append(work)
        sampling: list[Work] = []
        logits: list[Tensor] = []
        for group in groups.values():
            group.sort(key=lambda work: work.count)  # attention wants short stretches first
            members = [work for work in group if work.samples]
            group_logits = self._run_group(group, bool(members))
            if group_logits is not None:
                sampling += members
                logits.append(group_logits)
        if not logits:
            return [], None
        return sampling, logits[0] if len(logits) == 1 else torch.cat(logits)

    def score(self, load_id: str, token_ids: list[int]) -> Slices[list[float]]:
        """Log-probabilities of token_ids[1:], computed without the KV cache."""
        load = self._loads[load_id]
        device = self._model.device
        ids = torch.tensor(token_ids, device=device)
        lora = None if load.adapter is None else LoraBatch(self._loads.stack((load_id,)), None)
        batch = Batch(
            token_ids=ids[:-1],
            positions=torch.arange(len(token_ids) - 1, device=device),
            attention=plan_dense(len(token_ids) - 1),
            lora=lora,
        )
        hidden = yield from self._model.forward_in_slices(load.weights, batch)
        parts = []
        for start in range(0, len(hidden), _SCORE_ROWS):
            logits = load.weights.lm_head(hidden[start : start + _SCORE_ROWS]).float()
            targets = ids[start + 1 : start + 1 + len(logits), None]
            parts.append(logits.gather(1, targets)[:, 0] - logits.logsumexp(dim=-1))
            yield
        if load_id not in self._loads or self._loads[load_id] is not load:
            raise EngineError(f"{load_id} was dropped or memory was released while it was scored")
        scores: list[float] = torch.cat(parts).tolist()
        return scores

    def _run_group(self, works: list[Work], samples: bool) -> Tensor | None:
        model = self._model
        assert self.kv is not None
        token_ids: list[int] = []
        positions, stretches, rows = [], [], []
        for work in works:
            sequence, begin = work.sequence, work.sequence.num_computed
            stretches.append(Stretch(len(token_ids), work.count, begin, sequence.pages))
            token_ids += sequence.tokens[begin : begin + work.count]
            positions.append(np.arange(begin, begin + work.count))
            if work.samples:
                rows.append(len(token_ids) - 1)
        batch = Batch(
            token_ids=torch.tensor(token_ids, device=model.device),
            positions=torch.from_numpy(np.concatenate(positions)).to(model.device),
            attention=plan_paged(stretches, self.kv, model.ops.row_tables_up_to),
            lora=self._lora(works),
        )
        weights = self._loads[works[0].sequence.load_id].weights
        hidden = model.forward(weights, batch)
        if not samples:
            return None
        if len(rows) < len(token_ids):
            hidden = hidden.index_select(0, torch.tensor(rows, device=model.device))
        return weights.lm_head(hidden)

    def _lora(self, works: list[Work]) -> LoraBatch | None:
        load_ids = [work.sequence.load_id for work in works]
        adapted = tuple(sorted({load_id for load_id in load_ids if self._loads[load_id].adapter is not None}))
        if not adapted:
            return None
        stack = self._loads.stack(adapted)
        if set(load_ids) == set(adapted) and len(adapted) == 1:
            return LoraBatch(stack, None)
        numbers = {load_id: number for number, load_id in enumerate(adapted)}
        per_work = [numbers.get(load_id, -1) for load_id in load_ids]
        token_adapters = np.repeat(per_work, [work.count for work in works])
        return LoraBatch(stack, torch.from_numpy(token_adapters).to(self._model.device))
