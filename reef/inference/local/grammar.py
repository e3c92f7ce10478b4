"""Structured output: which tokens may come next, by llguidance, and a queue that compiles grammars off the step loop.

    add ──► queue ──compiler thread──► finished ──step loop──► waiting ──► running
              (a grammar is compiled once, however many requests wait for it)

llguidance bounds the work of compiling and of every mask by fuel. Time is bounded here: a grammar that takes longer is
refused, and its thread left to end by itself.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from reef.errors import InvalidRequest, ReefError, Unavailable
from reef.inference.chat.grammars import WHITESPACE
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.runtime.interfaces import Grammar

log = logging.getLogger(__name__)

FIELD = "sampling.grammar"
KINDS = ("json_schema", "json_object", "regex", "choice", "lark")

_CACHED = 128  # compiled grammars
_ABANDONED = 2  # compilations that outlive their time, before no other is begun
_LIMITS = LLParserLimits(verbose_errors=False)


class GrammarState:
    """One request's place in its grammar. It depends on the output tokens alone, so it outlives retraction."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, [V]. End tokens may where the output is complete. All False after an error."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            return np.zeros(self._vocab_size, dtype=np.bool_)
        found: npt.NDArray[np.bool_] = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        return found

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped()) and self.error is None

    @property
    def error(self) -> str | None:
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else None


class GrammarVocabulary:
    """A model's tokens as llguidance wants them. Blocking to make: about a second for a large vocabulary."""

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's, which may have rows that no token uses; those are never allowed."""
        if not end_ids:
            raise InvalidRequest("a grammar needs a model with an end token", FIELD)
        self.size = vocab_size
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokens(tokenizer, vocab_size, end_ids)), eos_token=sorted(end_ids)
        )

    def compile(self, grammar: Grammar) -> GrammarState:
        """Raises InvalidRequest saying what is wrong with the grammar."""
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        state = GrammarState(matcher, self.size)
        if state.error is None and not state.allowed().any() and state.error is None:
            raise InvalidRequest(f"{grammar.kind}: no output can match it", FIELD)
        if state.error is not None:
            raise InvalidRequest(f"{grammar.kind}: {state.error}", FIELD)
        return state


class _Tokens:
    """What TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        count = max(vocab_size, tokenizer.vocab_size)
        self.eos_token_id = min(end_ids)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(count)]
        self.special_token_ids = sorted(tokenizer.special_ids.union(end_ids))
        special = set(self.special_token_ids)
        self._ids = {token: token_id for token_id, token in enumerate(self.tokens) if token and token_id not in special}
        self._longest_token = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """What the text is forced to be written with, so it must spell exactly that: no tokenizer's space before it."""
        wanted = text.encode() if isinstance(text, str) else text
        ids = self._tokenizer.encode_now(wanted.decode(errors="replace"), goes_on=True)
        if b"".join(self.tokens[token_id] for token_id in ids) == wanted:
            return ids
        return self._longest(wanted)

    def _longest(self, wanted: bytes) -> list[int]:
        """By the longest token each time. Ends early where no token goes on."""
        found: list[int] = []
        while wanted:
            sizes = range(min(len(wanted), self._longest_token), 0, -1)
            size = next((size for size in sizes if wanted[:size] in self._ids), 0)
            if size == 0:
                break
            found.append(self._ids[wanted[:size]])
            wanted = wanted[size:]
        return found


def check_grammar(grammar: Grammar, max_bytes: int) -> None:
    """What can be told at once. Raises InvalidRequest."""
    if grammar.kind not in KINDS:
        raise InvalidRequest(f"the kind of a grammar must be one of {', '.join(KINDS)}, got {grammar.kind!r}", FIELD)
    size = len(grammar.value.encode(errors="replace"))
    if size > max_bytes:
        raise InvalidRequest(f"{grammar.kind} must have at most {max_bytes} bytes, got {size}", FIELD)
    _source(grammar)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's terms. Raises InvalidRequest."""
    try:
        return _translated(grammar)
    except (ValueError, RecursionError) as error:  # half a character, say
        raise InvalidRequest(f"{grammar.kind}: {error}", FIELD) from error


def _translated(grammar: Grammar) -> str:
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.value))
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.value))
    if grammar.kind == "choice":
        choices = _json(grammar)
        if not (isinstance(choices, list) and choices and all(isinstance(one, str) and one for one in choices)):
            raise InvalidRequest("choice must be a list of one or more strings that are not empty", FIELD)
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in choices)))
    schema = _json(grammar) if grammar.kind == "json_schema" else {"type": "object"}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"json_schema must be a JSON object, got {grammar.value[:60]!r}", FIELD)
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE}))


def _json(grammar: Grammar) -> Any:
    try:
        return json.loads(grammar.value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{grammar.kind} must be JSON: {error}", FIELD) from error


def _one_line(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())


@dataclass(slots=True, eq=False)
class _Job:
    grammar: Grammar
    waiting: set[str] = field(default_factory=set)  # request ids


Outcome = GrammarState | ReefError


class GrammarQueue:
    """Compiles on a thread of its own. `submit`, `cancel` and `take` are for the thread that steps the engine.

    `wake` is called, on another thread, when `take` has something new to return.
    """

    def __init__(
        self,
        make: Callable[[], Callable[[Grammar], GrammarState]],
        *,
        timeout: float,
        limit: int,
        wake: Callable[[], None],
    ) -> None:
        """`make` is called once, on the compiling thread, for what compiles a grammar. `limit` grammars may wait."""
        self._make = make
        self._timeout = timeout
        self._limit = limit
        self._wake = wake
        self._compile: Callable[[Grammar], GrammarState] | None = None
        self._compiled: OrderedDict[Grammar, GrammarState] = OrderedDict()
        self._lock = Lock()  # guards all below
        self._queue: deque[_Job] = deque()  # the first may be compiling
        self._finished: list[tuple[str, Outcome]] = []
        self._abandoned: list[Thread] = []
        self._thread: Thread | None = None

    @property
    def finished(self) -> bool:
        return bool(self._finished)

    def submit(self, request_id: str, grammar: Grammar) -> GrammarState | None:
        """A fresh state if the grammar is compiled already; else None, and `take` returns it. Raises Unavailable."""
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known.copy()
            job = next((one for one in self._queue if one.grammar == grammar), None)
            if job is None:
                if len(self._queue) >= self._limit:
                    raise Unavailable(f"{len(self._queue)} grammars wait to be compiled, the most that may")
                job = _Job(grammar)
                self._queue.append(job)
            job.waiting.add(request_id)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
        return None

    def cancel(self, request_id: str) -> None:
        """The request does not wait any more. A grammar that nobody waits for and that was not begun is dropped."""
        with self._lock:
            for job in list(self._queue):
                job.waiting.discard(request_id)
                if not job.waiting and job is not self._queue[0]:
                    self._queue.remove(job)
            self._finished = [one for one in self._finished if one[0] != request_id]

    def take(self) -> list[tuple[str, Outcome]]:
        """Requests whose grammars are compiled, each with its state, or with why there is none."""
        with self._lock:
            taken, self._finished = self._finished, []
        return taken

    def _run(self) -> None:
        """Ends when the queue is empty, so that an engine that is gone is not kept by its thread."""
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                job = self._queue[0]
            outcome = self._attempt(job.grammar)
            with self._lock:
                self._queue.popleft()
                if isinstance(outcome, GrammarState):
                    self._compiled[job.grammar] = outcome
                    while len(self._compiled) > _CACHED:
                        self._compiled.popitem(last=False)
                states = (outcome.copy() if isinstance(outcome, GrammarState) else outcome for _ in job.waiting)
                self._finished += zip(sorted(job.waiting), states, strict=True)
            self._wake()

    def _attempt(self, grammar: Grammar) -> Outcome:
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= _ABANDONED:
            return Unavailable("earlier grammars are still compiling long after their time")
        done: Future[GrammarState] = Future()
        try:
            if self._compile is None:
                self._compile = self._make()
            thread = Thread(target=_work, args=(self._compile, grammar, done), name="grammar", daemon=True)
            thread.start()
            return done.result(self._timeout)
        except TimeoutError:
            self._abandoned.append(thread)
            return InvalidRequest(f"{grammar.kind} takes longer than {self._timeout:g} s to compile", FIELD)
        except ReefError as error:
            return error
        except BaseException as error:  # llguidance may panic, which is no Exception
            log.exception("a grammar could not be compiled")
            return InvalidRequest(f"{grammar.kind} could not be compiled: {error}", FIELD)


def _work(compile_one: Callable[[Grammar], GrammarState], grammar: Grammar, done: Future[GrammarState]) -> None:
    try:
        done.set_result(compile_one(grammar))
    except BaseException as error:
        done.set_exception(error)
