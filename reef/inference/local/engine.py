"""The local token engine: prompt ids in; output ids, log-probabilities and spans out.

One call of `step` is one iteration: schedule, run, sample, advance. Everything else changes what the next iteration
sees. Not thread safe: one thread makes all calls.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from reef import device
from reef.errors import ConfigError, EngineError, InvalidRequest, ReefError
from reef.inference.chat.detokenizer import TextStream
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.inference.local.config import LocalConfig
from reef.inference.local.grammar import FIELD, GrammarQueue, GrammarState, GrammarVocabulary, check_grammar
from reef.inference.local.kv_cache import PagePool, PrefixCache
from reef.inference.local.loads import Loads
from reef.inference.local.model import Model, ModelSpec
from reef.inference.local.native import make_ops
from reef.inference.local.runner import Runner
from reef.inference.local.sampler import Row, Sampled, sample
from reef.inference.local.scheduler import Scheduler, Work
from reef.inference.local.sequence import Sequence
from reef.inference.local.slices import Slices, whole
from reef.inference.local.validation import check_request
from reef.inference.local.weights import end_token_ids, read_config
from reef.points import Point, crossing
from reef.runtime.interfaces import (
    BASE_LANE,
    BASE_LOAD_ID,
    Ending,
    EngineReport,
    GenerateRequest,
    Grammar,
    MemoryRegion,
    MemoryReport,
    PauseMode,
    PrefixUse,
    TokenChunk,
    WeightLoad,
)

T = TypeVar("T")


class LocalEngine:
    """One model on one device, with any number of lanes.

    A request follows its lane: after `activate`, what it generates comes from the new load and its chunks say so. Under
    RETRACT everything before is recomputed with the new weights; under IN_PLACE a request that has generated tokens
    goes on with the keys and values it has. A request that pins a load stays on it.
    """

    def __init__(
        self,
        config: LocalConfig,
        name: str = "engine-0",
        base_content_id: str = "base",
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Load the base model as BASE_LOAD_ID. Raises EngineError (unsupported or unreadable model), ConfigError.

        `wake` is called from another thread when `has_work` became true there: a grammar was compiled.
        """
        self._name = name
        self._path = Path(config.model_path)
        if config.threads:
            torch.set_num_threads(config.threads)
        model_config = read_config(self._path)
        spec = ModelSpec.from_config(model_config)
        self.device = device.choose(config.resolved_device, "inference.device")
        self.dtype = _dtype(config.dtype, getattr(model_config, "dtype", None), self.device)
        num_pages = config.kv_cache_tokens // config.page_size
        self.max_context = min(spec.max_context, num_pages * config.page_size, config.max_context or spec.max_context)
        self.vocab_size = spec.vocab_size
        self._config = config
        self._end_ids = end_token_ids(self._path, model_config)
        self._tokenizer: ChatTokenizer | None = None
        ops = make_ops(config.kernels, self.device, spec.head_dim)
        self._loads = Loads(
            self._path,
            spec,
            dtype=self.dtype,
            device=self.device,
            ops=ops,
            max_loads=config.max_loads,
            base_content_id=base_content_id,
        )
        model = Model(spec, self.dtype, self.device, self.max_context, ops)
        self._runner = Runner(model, self._loads, num_pages=num_pages, page_size=config.page_size)
        self._num_pages = num_pages
        self._token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize
        self._prefixes: dict[str, PrefixUse] = {}
        self._lanes = {BASE_LANE: BASE_LOAD_ID}
        self._paused = False
        self._requests: dict[str, Sequence] = {}
        self._compiling: dict[str, Sequence] = {}  # those of the requests that wait for their grammar
        self._notices: list[TokenChunk] = []  # last chunks of requests that ended outside a step
        self._refused: list[tuple[str, ReefError]] = []  # after `add` had taken them
        self._grammars = GrammarQueue(
            self._grammar_compiler, timeout=config.grammar_timeout, limit=config.grammar_queue, wake=wake
        )
        self._leaked: dict[str, str] = {}
        self._arrivals = itertools.count()
        self._stats = dict.fromkeys(
            ("steps", "prompt_tokens", "cached_tokens", "output_tokens", "computed_tokens"), 0.0
        )
        self._reset()

    # ------------------------------------------------------------------------------------------ requests

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequest for what cannot be honoured, Unavailable if too many grammars wait.

        A grammar that turns out to be wrong when it is compiled is in `take_refused` later.
        """
        if request.request_id in self._requests:
            raise InvalidRequest(f"request {request.request_id!r} is in flight already", "request_id")
        check_request(request, vocab_size=self.vocab_size, max_context=self.max_context)
        load_id = request.runtime_load_id or self._lane_load(request.lane)
        if request.runtime_load_id is not None and load_id not in self._loads:
            raise InvalidRequest(f"runtime load {load_id!r} is not resident", "runtime_load_id")
        params = request.sampling
        if params.grammar is not None:
            check_grammar(params.grammar, self._config.grammar_max_bytes)
        penalized = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        own_ends = () if params.ignore_eos else self._end_ids
        sequence = Sequence(
            request=request,
            arrival=next(self._arrivals),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            end_ids=frozenset(params.stop_token_ids).union(own_ends),
            load_id=load_id,
            text=TextStream(self._chat_tokenizer("sampling.stop"), params.stop) if params.stop else None,
            output_counts=np.zeros(self.vocab_size, dtype=np.int32) if penalized else None,
        )
        if params.grammar is not None:
            sequence.grammar = self._grammars.submit(request.request_id, params.grammar)
        self._requests[request.request_id] = sequence
        if params.grammar is not None and sequence.grammar is None:
            self._compiling[request.request_id] = sequence
        else:
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request with CLIENT_LEFT; an unknown id is ignored."""
        if (sequence := self._requests.get(request_id)) is not None:
            self._end_now(sequence, Ending.CLIENT_LEFT)

    def has_work(self) -> bool:
        """Whether `step` would return or compute anything."""
        ready = len(self._requests) > len(self._compiling) and not self._paused
        return bool(self._notices or self._grammars.finished or ready)

    def step(self) -> list[TokenChunk]:
        """One iteration. While paused, only last chunks of requests that were ended; never a token."""
        chunks, self._notices = self._notices, []
        self._admit_compiled()
        if not self._paused and len(self._requests) > len(self._compiling):
            with torch.inference_mode():
                chunks += self._iterate()
        return chunks

    def take_refused(self) -> list[tuple[str, ReefError]]:
        """Request ids that a step found to be impossible after `add`, and why. They have no chunks."""
        refused, self._refused = self._refused, []
        return refused

    def _admit_compiled(self) -> None:
        for request_id, outcome in self._grammars.take():
            sequence = self._compiling.pop(request_id)
            if isinstance(outcome, GrammarState):
                sequence.grammar = outcome
                self._scheduler.add(sequence)
            else:
                del self._requests[request_id]
                self._refused.append((request_id, outcome))

    def _iterate(self) -> list[TokenChunk]:
        chunks: list[TokenChunk] = []
        works = self._scheduler.schedule()
        sampling, logits = self._runner.run(works)
        self._advance(works)
        if logits is not None:
            sampled = sample(logits, [_row(work.sequence) for work in sampling])
            chunks += self._emit([work.sequence for work in sampling], sampled)
        for work in works:
            if work.count > 1 and work.sequence.pages:
                self._scheduler.share(work.sequence)
        return chunks

    def fail_all(self, reason: str) -> list[TokenChunk]:
        """End everything in flight with ENGINE_CUT and start over with an empty cache."""
        for sequence in self._requests.values():
            self._notices.append(_last_chunk(sequence, Ending.ENGINE_CUT, reason))
        for request_id in self._compiling:
            self._grammars.cancel(request_id)
        self._compiling.clear()
        self._requests.clear()
        self._reset()
        if self._runner.kv is not None:
            self._runner.allocate()
        chunks, self._notices = self._notices, []
        return chunks

    # ------------------------------------------------------------------------------------------ control

    def pause(self, mode: PauseMode) -> None:
        """Generate nothing until `resume`. RETRACT also drops all KV, of requests and of the prefix cache."""
        self._paused = True
        if mode is PauseMode.RETRACT:
            for sequence in list(self._scheduler.running):
                self._scheduler.retract(sequence, keep_prefix=False)
            self.flush()

    def resume(self) -> None:
        """Raises EngineError while memory is released or a lane's load is not resident."""
        if self._runner.kv is None:
            raise EngineError("the engine's memory is released: restore it before resuming")
        for lane, load_id in self._lanes.items():
            if load_id not in self._loads:
                raise EngineError(f"lane {lane!r} serves {load_id}, which is not resident: stage it before resuming")
        self._paused = False

    def flush(self) -> None:
        """Drop every cached prefix. Running requests keep the pages they read until they end."""
        with crossing(Point.ENGINE_FLUSH):
            self._cache.flush()

    def stage(self, load: WeightLoad) -> None:
        """Make weights resident; they serve requests that pin them. Raises EngineError; then nothing has changed."""
        whole(self.stage_in_slices(load))

    def stage_in_slices(self, load: WeightLoad) -> Slices[None]:
        """`stage`, between whose slices anything may be called. Raises EngineError also if `load` is dropped then."""
        return _without_gradients(self._loads.stage(load))

    def activate(self, lane: str, runtime_load_id: str) -> None:
        """Point a lane at a resident load. Raises EngineError unless paused."""
        if not self._paused:
            raise EngineError("activate is legal only while the engine is paused")
        if runtime_load_id not in self._loads:
            raise EngineError(f"runtime load {runtime_load_id!r} is not resident")
        if lane == BASE_LANE and runtime_load_id != BASE_LOAD_ID:
            raise EngineError(f"the base lane always serves {BASE_LOAD_ID}, got {runtime_load_id!r}")
        self._lanes[lane] = runtime_load_id
        for sequence in self._requests.values():
            if sequence.request.lane == lane and not sequence.pinned and sequence.load_id != runtime_load_id:
                self._switch(sequence, runtime_load_id)

    def drop(self, runtime_load_id: str) -> None:
        """Free a load that no lane serves; requests that pin it end with ENGINE_CUT. An unknown ID is ignored."""
        if runtime_load_id not in self._loads:
            self._loads.drop(runtime_load_id)  # it may be on its way
            return
        lanes = [lane for lane, load_id in self._lanes.items() if load_id == runtime_load_id]
        if lanes:
            raise EngineError(f"runtime load {runtime_load_id!r} serves lane {lanes[0]!r} and cannot be dropped")
        for sequence in [one for one in self._requests.values() if one.load_id == runtime_load_id]:
            self._end_now(sequence, Ending.ENGINE_CUT, f"runtime load {runtime_load_id!r} was dropped")
        try:
            self._cache.drop(runtime_load_id)
            self._loads.drop(runtime_load_id)
        except Exception as error:
            self._leaked[runtime_load_id] = f"{type(error).__name__}: {error}"
            raise EngineError(f"runtime load {runtime_load_id!r} could not be freed: {error}") from error
        self._leaked.pop(runtime_load_id, None)

    def evict(self, runtime_load_id: str) -> bool:
        """`drop` it unless a request decodes with it; False if one does."""
        if any(one.load_id == runtime_load_id for one in self._requests.values()):
            return False
        self.drop(runtime_load_id)
        return True

    def score(self, runtime_load_id: str, token_ids: list[int]) -> list[float]:
        """Log-probabilities of token_ids[1:] at temperature 1, [num_tokens - 1]. Raises EngineError, InvalidRequest."""
        return whole(self.score_in_slices(runtime_load_id, token_ids))

    def score_in_slices(self, runtime_load_id: str, token_ids: list[int]) -> Slices[list[float]]:
        """`score`, between whose slices anything may be called; the numbers are the same, bit by bit."""
        if runtime_load_id not in self._loads:
            raise EngineError(f"runtime load {runtime_load_id!r} is not resident")
        if not 2 <= len(token_ids) <= self.max_context:
            raise InvalidRequest(f"token_ids must have 2 to {self.max_context} ids, got {len(token_ids)}", "token_ids")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise InvalidRequest(f"token ids must be in [0, {self.vocab_size})", "token_ids")
        return _without_gradients(self._runner.score(runtime_load_id, token_ids))

    def report(self) -> EngineReport:
        return EngineReport(
            engine=self._name,
            lanes=dict(self._lanes),
            loads=self._loads.content_ids(),
            paused=self._paused,
            free_pages=self._pool.free,
            total_pages=self._pool.total,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + len(self._compiling),
            dtype=str(self.dtype).removeprefix("torch."),
            leaked=dict(self._leaked),
            stats={
                **self._stats,
                "cached_pages": float(self._cache.num_pages),
                "evicted_pages": float(self._cache.evictions),
                "retractions": float(self._scheduler.retractions),
                "compiling": float(len(self._compiling)),
                "cached_bytes": float(self._cache.num_pages * self._config.page_size * self._token_bytes),
            },
            prefixes={lane: replace(use) for lane, use in self._prefixes.items()},
        )

    def release_memory(self, regions: Collection[MemoryRegion]) -> MemoryReport:
        """Free KV pages, all weights, or both. Requests go back to the queue; with the weights, pinned ones are cut.

        Raises EngineError, with nothing changed, unless paused and for a region that an engine has not.
        """
        if not self._paused:
            raise EngineError("release_memory is legal only while the engine is paused")
        if unknown := set(regions) - {MemoryRegion.WEIGHTS, MemoryRegion.KV_CACHE}:
            raise EngineError(f"an engine has no memory region {', '.join(sorted(unknown))}")
        before = device.held_bytes(self.device)
        self.pause(PauseMode.RETRACT)
        if MemoryRegion.KV_CACHE in regions:
            self._runner.kv = None
        if MemoryRegion.WEIGHTS in regions:
            for sequence in [one for one in self._requests.values() if one.pinned and one.load_id != BASE_LOAD_ID]:
                self._end_now(sequence, Ending.ENGINE_CUT, f"runtime load {sequence.load_id!r} was released")
            self._loads.release()
        device.give_back(self.device)
        return self._memory(before)

    def restore_memory(self) -> MemoryReport:
        """Bring back the base and an empty cache. Lanes keep their load IDs; loads that are gone are staged again."""
        before = device.held_bytes(self.device)
        with torch.inference_mode():
            self._loads.restore()
        if self._runner.kv is None:
            self._runner.allocate()
        device.give_back(self.device)  # what reading the weights took besides
        return self._memory(before)

    def _memory(self, before: int) -> MemoryReport:
        gone = {MemoryRegion.WEIGHTS: BASE_LOAD_ID not in self._loads, MemoryRegion.KV_CACHE: self._runner.kv is None}
        return MemoryReport(
            owner=self._name,
            released=[region for region, released in gone.items() if released],
            bytes_before=before,
            bytes_after=device.held_bytes(self.device),
            device_free=device.free_bytes(self.device),
        )

    # ------------------------------------------------------------------------------------------ inside

    def _reset(self) -> None:
        config = self._config
        self._pool = PagePool(self._num_pages)
        self._cache = PrefixCache(self._pool, config.page_size)
        self._scheduler = Scheduler(
            self._pool,
            self._cache,
            max_running=config.max_running,
            max_batch_tokens=config.max_batch_tokens,
            share_prefixes=config.prefix_cache,
            token_bytes=self._token_bytes,
            prefixes=self._prefixes,
        )

    def _lane_load(self, lane: str) -> str:
        return self._lanes.get(lane, BASE_LOAD_ID)

    def _switch(self, sequence: Sequence, load_id: str) -> None:
        """Move a request to another load. One that has no output, or whose KV is incomplete, simply starts again."""
        if sequence.pages:
            if sequence.num_output and sequence.num_pending == 1:
                self._scheduler.share(sequence)
                sequence.mixed = True
            else:
                self._scheduler.retract(sequence, keep_prefix=True)
        sequence.load_id = load_id

    def _advance(self, works: list[Work]) -> None:
        self._stats["steps"] += 1
        for work in works:
            work.sequence.num_computed += work.count
            self._stats["computed_tokens"] += work.count

    def _emit(self, sequences: list[Sequence], sampled: Sampled) -> list[TokenChunk]:
        chunks = []
        columns = zip(
            sequences, sampled.token_ids, sampled.logprobs, sampled.sampled_logprobs, sampled.top_logprobs, strict=True
        )
        for sequence, token_id, logprob, sampled_logprob, top in columns:
            if not math.isfinite(logprob):
                self._quarantine(sequence)
                chunks.append(self._notices.pop())
                continue
            if sequence.grammar is not None and (error := sequence.grammar.error) is not None:
                self._end_now(sequence, Ending.ENGINE_CUT, f"the grammar cannot go on: {error}")
                chunks.append(self._notices.pop())
                continue
            sequence.append(token_id)
            chunk = TokenChunk(
                request_id=sequence.request.request_id,
                token_ids=[token_id],
                logprobs=[logprob],
                sampled_logprobs=[sampled_logprob],
                runtime_load_id=sequence.load_id,
                top_logprobs=[top] if top else [],
                cached_tokens=sequence.cached_tokens or 0,
            )
            chunk.ending, chunk.stopped_by = sequence.ending_after(token_id)
            if chunk.ending is not None:
                self._forget(sequence)
            chunks.append(chunk)
        self._stats["output_tokens"] += len(chunks)
        return chunks

    def _forget(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        del self._requests[request_id]
        if self._compiling.pop(request_id, None) is not None:
            self._grammars.cancel(request_id)
            return
        self._stats["prompt_tokens"] += sequence.num_prompt
        self._stats["cached_tokens"] += sequence.cached_tokens or 0
        self._scheduler.finish(sequence)

    def _end_now(self, sequence: Sequence, ending: Ending, error: str | None = None) -> None:
        self._forget(sequence)
        self._notices.append(_last_chunk(sequence, ending, error))

    def _quarantine(self, sequence: Sequence) -> None:
        """Cut a request whose logits are not finite, and wipe whatever it may have left in freed pages."""
        self._cache.drop(sequence.load_id)
        sequence.mixed = True  # keeps its pages out of the cache
        self._end_now(sequence, Ending.ENGINE_CUT, f"the logits under {sequence.load_id} are not finite")
        assert self._runner.kv is not None
        self._runner.kv.clear(self._pool.free_pages())

    def _chat_tokenizer(self, field: str) -> ChatTokenizer:
        """The model's own, read when `field` first needs it. Raises InvalidRequest naming the field."""
        if self._tokenizer is None:
            try:
                self._tokenizer = ChatTokenizer.load(self._path)
            except ConfigError as error:
                raise InvalidRequest(f"{field} needs the model's tokenizer: {error}", field) from error
        return self._tokenizer

    def _grammar_compiler(self) -> Callable[[Grammar], GrammarState]:
        """Runs on the compiling thread."""
        vocabulary = GrammarVocabulary(self._chat_tokenizer(FIELD), self.vocab_size, sorted(self._end_ids))
        return vocabulary.compile


def _without_gradients(slices: Slices[T]) -> Slices[T]:
    """In inference mode during each slice, but not between them."""
    while True:
        with torch.inference_mode():
            try:
                next(slices)
            except StopIteration as end:
                result: T = end.value
                return result
        yield


def _row(sequence: Sequence) -> Row:
    return Row(
        sequence.request.sampling,
        sequence.seed,
        len(sequence.tokens),
        sequence.request.prompt_ids,
        sequence.output_counts,
        None if sequence.grammar is None else sequence.grammar.allowed(),
    )


def _last_chunk(sequence: Sequence, ending: Ending, error: str | None) -> TokenChunk:
    return TokenChunk(
        request_id=sequence.request.request_id,
        token_ids=[],
        logprobs=[],
        sampled_logprobs=[],
        runtime_load_id=sequence.load_id,
        ending=ending,
        cached_tokens=sequence.cached_tokens or 0,
        error=error,
    )


def _dtype(name: str, checkpoint: torch.dtype | None, where: torch.device) -> torch.dtype:
    """auto: bfloat16 for a 16-bit checkpoint where the device computes in it natively, else float32."""
    if name == "auto":
        native = torch.cuda.is_bf16_supported() if where.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
        name = "bfloat16" if native and checkpoint in (torch.bfloat16, torch.float16) else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32
