"""Pages of the KV cache: who holds them, and the radix tree that shares them between requests.

Every page is in exactly one place: free in the pool, held by one sequence, or a node of the tree. A node's page may
be read by any number of sequences; it is written by none. Tensors are elsewhere; here are numbers only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

NULL_PAGE = 0
"""Padding of page tables points here. It is never handed out, so it stays zero."""


class OutOfPages(Exception):
    """The pool has fewer free pages than asked for. Nothing was taken."""


class PagePool:
    """Free pages, numbered 1 to `total`. The page freed last is handed out first: it is the warmest."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def free_pages(self) -> list[int]:
        return list(self._free)

    def take(self, count: int) -> list[int]:
        """Raises OutOfPages."""
        if count > len(self._free):
            raise OutOfPages(f"wanted {count} pages, {len(self._free)} are free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def give(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))


@dataclass(slots=True, eq=False)
class Node:
    """One page of a cached prefix: the tokens on it, below the pages of the tokens before them."""

    key: tuple[int, ...]  # [page_size]
    page: int
    parent: Node | None  # None: a root, which has no page
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    readers: int = 0  # sequences that hold it
    last_used: int = 0
    detached: bool = False  # no longer in the tree: its page is freed with its last reader


class PrefixCache:
    """A radix tree per runtime load ID, one page an edge, so that no hit ever crosses loads or adapters.

    A reader of a node also holds all nodes above it. Pages are evicted from the leaves, least recently used first.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.page_size = page_size
        self.evictions = 0
        self._pool = pool
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._evictable: list[tuple[int, int, Node]] = []  # heap; entries may be out of date
        self._num_unread = 0
        self._num_nodes = 0
        self._pushes = 0

    @property
    def num_pages(self) -> int:
        return self._num_nodes

    @property
    def num_evictable(self) -> int:
        """Pages that eviction can free now."""
        return self._num_unread

    def match(self, load_id: str, tokens: Sequence[int], limit: int) -> list[Node]:
        """The longest cached prefix of `tokens` with at most `limit` tokens, as the nodes of its pages."""
        node = self._roots.get(load_id)
        found: list[Node] = []
        if node is None:
            return found
        for start in range(0, limit - self.page_size + 1, self.page_size):
            node = node.children.get(tuple(tokens[start : start + self.page_size]))
            if node is None:
                break
            found.append(node)
        return found

    def hold(self, nodes: Sequence[Node]) -> None:
        """Become a reader of `nodes`."""
        self._clock += 1
        for node in nodes:
            if node.readers == 0:
                self._num_unread -= 1
            node.readers += 1
            node.last_used = self._clock

    def release(self, nodes: Sequence[Node]) -> None:
        """Stop reading `nodes`. Those that left the tree meanwhile are freed with their last reader."""
        self._clock += 1
        for node in reversed(nodes):
            node.readers -= 1
            node.last_used = self._clock
            if node.readers:
                continue
            if node.detached:
                self._pool.give([node.page])
            else:
                self._num_unread += 1
                self._offer(node)

    def extend(self, load_id: str, held: list[Node], tokens: Sequence[int], pages: list[int]) -> None:
        """Move full pages of a sequence into the tree and hold them there.

        `held` are the nodes of the sequence's first pages; `pages` are all its pages, of which those after `held` that
        `tokens` (the tokens with KV) fill completely are moved. Where the tree already has such a page, the sequence
        uses that one and gives its own back. Does nothing once the nodes held have left the tree.
        """
        if held and held[-1].detached:
            return
        size = self.page_size
        parent = held[-1] if held else self._roots.setdefault(load_id, Node((), NULL_PAGE, None))
        self._clock += 1
        for index in range(len(held), len(tokens) // size):
            key = tuple(tokens[index * size : (index + 1) * size])
            node = parent.children.get(key)
            if node is None:
                node = Node(key, pages[index], parent)
                parent.children[key] = node
                self._num_nodes += 1
            else:
                self._pool.give([pages[index]])
                pages[index] = node.page
                if node.readers == 0:
                    self._num_unread -= 1
            node.readers += 1
            node.last_used = self._clock
            held.append(node)
            parent = node

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used first; return how many."""
        freed = 0
        while freed < count and self._evictable:
            used, _, node = heapq.heappop(self._evictable)
            if node.detached or node.readers or node.children or node.last_used != used:
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            node.detached = True
            self._num_nodes -= 1
            self._num_unread -= 1
            self._pool.give([node.page])
            freed += 1
            if parent.parent is not None and parent.readers == 0:
                self._offer(parent)
        self.evictions += freed
        return freed

    def flush(self) -> None:
        """Empty the tree. Pages that sequences are reading are freed when those are done."""
        for load_id in list(self._roots):
            self.drop(load_id)
        self._evictable.clear()

    def drop(self, load_id: str) -> None:
        """Forget the tree of one load, as `flush` does with all."""
        root = self._roots.pop(load_id, None)
        if root is None:
            return
        nodes = list(root.children.values())
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            node.children.clear()
            node.detached = True
            self._num_nodes -= 1
            if node.readers == 0:
                self._num_unread -= 1
                self._pool.give([node.page])

    def _offer(self, node: Node) -> None:
        """Put a leaf without readers on the heap; clear the heap of old entries when they are the most."""
        if node.children:
            return
        self._pushes += 1
        heapq.heappush(self._evictable, (node.last_used, self._pushes, node))
        if len(self._evictable) > 64 + 4 * self._num_nodes:
            self._evictable = [
                entry
                for entry in self._evictable
                if not (entry[2].detached or entry[2].readers or entry[2].children or entry[2].last_used != entry[0])
            ]
            heapq.heapify(self._evictable)
