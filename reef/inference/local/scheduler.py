"""Which sequences run in the next step, with how many tokens each, on which pages.

add ──► waiting ──admit──► running ──finish──► gone
           ▲                  │
           └──── retract ─────┘   (its pages are freed; what they held is computed again)
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from reef.inference.local.kv_cache import PagePool, PrefixCache
from reef.inference.local.sequence import Sequence
from reef.runtime.interfaces import PrefixUse


@dataclass(slots=True, frozen=True)
class Work:
    """The next `count` tokens of one sequence. Its pages are already there."""

    sequence: Sequence
    count: int

    @property
    def samples(self) -> bool:
        """Whether its last token's logits are wanted."""
        return self.count == self.sequence.num_pending


class Scheduler:
    """Decoding first, then prefills that have begun, then admission, each by age. The youngest give way."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        *,
        max_running: int,
        max_batch_tokens: int,
        share_prefixes: bool,
        token_bytes: int,
        prefixes: dict[str, PrefixUse],
    ) -> None:
        """`token_bytes` is the size of one token's KV; what sharing does is added to `prefixes`, by lane."""
        self.waiting: list[Sequence] = []  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self.retractions = 0
        self._pool = pool
        self._cache = cache
        self._page_size = cache.page_size
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._share_prefixes = share_prefixes
        self._token_bytes = token_bytes
        self._prefixes = prefixes

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_arrival)

    def schedule(self) -> list[Work]:
        """Plan one step; decoding sequences come first."""
        retractions = self.retractions
        decodes = self._grow([sequence for sequence in self.running if sequence.num_pending == 1])
        budget = self._max_batch_tokens - len(decodes)
        prefills: list[Work] = []
        for sequence in [sequence for sequence in self.running if sequence.num_pending > 1]:
            if budget > 0 and sequence in self.running:  # else it was retracted meanwhile
                count = min(sequence.num_pending, budget)
                if self._reserve(sequence, count):
                    prefills.append(Work(sequence, count))
                    budget -= count
        if self.retractions == retractions:  # what was retracted must not come back in the same step
            for work in self._admit(budget):
                (prefills if work.count > 1 else decodes).append(work)
        return [work for work in decodes + prefills if work.sequence.pages]

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence and free its pages; full ones stay in the prefix cache."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.share(sequence)
            self._free(sequence)
        else:
            self.waiting.remove(sequence)

    def retract(self, sequence: Sequence, *, keep_prefix: bool) -> None:
        """Send a running sequence back to the queue. Its KV is gone, but for what `keep_prefix` leaves in the cache."""
        if keep_prefix:
            self.share(sequence)
        sequence.num_lost = sequence.num_computed
        self._free(sequence)
        self.running.remove(sequence)
        self.add(sequence)

    def share(self, sequence: Sequence) -> None:
        """Put the sequence's full pages into the prefix cache, unless their KV is of more than one load."""
        if self._share_prefixes and not sequence.mixed:
            computed = sequence.tokens[: sequence.num_computed]
            self._cache.extend(sequence.load_id, sequence.nodes, computed, sequence.pages)

    def _free(self, sequence: Sequence) -> None:
        self._pool.give(sequence.pages[len(sequence.nodes) :])
        self._cache.release(sequence.nodes)
        sequence.pages, sequence.nodes = [], []
        sequence.num_computed = 0
        sequence.mixed = False

    def _grow(self, sequences: list[Sequence]) -> list[Work]:
        works = []
        for sequence in sequences:
            # A sequence without pages was retracted for an older one.
            if sequence.pages and self._reserve(sequence, 1):
                works.append(Work(sequence, 1))
        return works

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Give a running sequence pages for `count` more tokens; False if it had to be retracted itself."""
        missing = -(-(sequence.num_computed + count) // self._page_size) - len(sequence.pages)
        if missing <= 0:
            return True
        while not self._make_room(missing):
            youngest = self.running[-1]
            self.retract(youngest, keep_prefix=True)
            self.retractions += 1
            if youngest is sequence:
                return False
        sequence.pages += self._pool.take(missing)
        return True

    def _make_room(self, pages: int) -> bool:
        lacking = pages - self._pool.free
        return lacking <= 0 or (lacking <= self._cache.num_evictable and self._cache.evict(lacking) == lacking)

    def _admit(self, budget: int) -> list[Work]:
        works: list[Work] = []
        prefilling = [other for other in self.running if other.num_pending > 1]
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._max_running:
                break
            if self._share_prefixes and self._prefix_is_coming(sequence, prefilling):
                continue
            if not self._take_in(sequence):
                break
            count = min(sequence.num_pending, budget)
            if not self._reserve(sequence, count):
                break
            works.append(Work(sequence, count))
            prefilling.append(sequence)
            budget -= count
        return works

    def _take_in(self, sequence: Sequence) -> bool:
        """Start a waiting sequence on what the cache has of it, if there is room for all of it and some growth."""
        nodes = []
        if self._share_prefixes:
            nodes = self._cache.match(sequence.load_id, sequence.tokens, len(sequence.tokens) - 1)
        self._cache.hold(nodes)
        wanted = -(-(len(sequence.tokens) + 1) // self._page_size) - len(nodes)
        promised = sum(max(0, self._pages_for(other) - len(other.pages)) + 1 for other in self.running)
        if self.running and wanted + promised > self._pool.free + self._cache.num_evictable:
            self._cache.release(nodes)
            return False
        sequence.nodes = nodes
        sequence.pages = [node.page for node in nodes]
        sequence.num_computed = len(nodes) * self._page_size
        use = self._prefixes.setdefault(sequence.request.lane, PrefixUse())
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            use.prompt_tokens += sequence.num_prompt
            use.hit_tokens += sequence.cached_tokens
            use.hit_bytes += sequence.cached_tokens * self._token_bytes
        use.recomputed_tokens += max(0, sequence.num_lost - sequence.num_computed)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_arrival)
        return True

    def _pages_for(self, sequence: Sequence) -> int:
        return -(-len(sequence.tokens) // self._page_size)

    def _prefix_is_coming(self, sequence: Sequence, prefilling: list[Sequence]) -> bool:
        """Whether one of `prefilling` will soon put pages into the cache that this sequence could start from."""
        size = self._page_size
        usable = (len(sequence.tokens) - 1) // size * size
        for other in prefilling:
            start = len(other.nodes) * size
            end = start + size
            if (
                not other.mixed
                and other.load_id == sequence.load_id
                and end <= min(usable, len(other.tokens))
                and sequence.tokens[start:end] == other.tokens[start:end]
                and sequence.tokens[:start] == other.tokens[:start]
                and not (other.nodes and other.nodes[-1].detached)
            ):
                return True
        return False


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
