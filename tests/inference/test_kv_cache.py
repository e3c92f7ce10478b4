"""Pages and the radix tree."""

from __future__ import annotations

import pytest

from reef.inference.local.kv_cache import OutOfPages, PagePool, PrefixCache


def filled(pool: PagePool, cache: PrefixCache, load_id: str, tokens: list[int]) -> list[int]:
    """Put a prefix into the cache and let go of it; return its pages."""
    pages = pool.take(len(tokens) // cache.page_size)
    nodes = []
    cache.extend(load_id, nodes, tokens, pages)
    cache.release(nodes)
    return pages


def fresh(total: int = 8, page_size: int = 2) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(total)
    return pool, PrefixCache(pool, page_size)


def test_pool_hands_out_each_page_once():
    pool = PagePool(3)
    pages = pool.take(2)
    assert len(set(pages)) == 2
    assert 0 not in pages
    with pytest.raises(OutOfPages):
        pool.take(2)
    pool.give(pages)
    assert pool.free == 3


def test_match_is_whole_pages_up_to_the_limit():
    pool, cache = fresh()
    pages = filled(pool, cache, "a", [1, 2, 3, 4, 5, 6])
    assert [node.page for node in cache.match("a", [1, 2, 3, 4, 5, 6], 6)] == pages
    assert [node.page for node in cache.match("a", [1, 2, 3, 4, 5, 6], 5)] == pages[:2]
    assert [node.page for node in cache.match("a", [1, 2, 3, 9, 5, 6], 6)] == pages[:1]
    assert cache.match("a", [2, 3], 2) == []


def test_loads_never_share():
    pool, cache = fresh()
    filled(pool, cache, "a", [1, 2])
    assert cache.match("b", [1, 2], 2) == []


def test_the_same_page_twice_is_kept_once():
    pool, cache = fresh()
    first = filled(pool, cache, "a", [1, 2, 3, 4])
    pages, nodes = pool.take(3), []
    cache.extend("a", nodes, [1, 2, 3, 4, 5, 6], pages)
    assert pages[:2] == first
    assert (cache.num_pages, pool.free) == (3, 5)


def test_eviction_takes_the_least_recently_used_leaf():
    pool, cache = fresh()
    old = filled(pool, cache, "a", [1, 2, 3, 4])
    new = filled(pool, cache, "a", [1, 2, 5, 6])
    assert new[0] == old[0]  # shared
    nodes = cache.match("a", [1, 2, 3, 4], 4)
    cache.hold(nodes)
    cache.release(nodes)
    assert cache.evict(1) == 1
    assert [len(cache.match("a", tokens, 4)) for tokens in ([1, 2, 3, 4], [1, 2, 5, 6])] == [2, 1]
    assert cache.evict(5) == 2
    assert (cache.num_pages, pool.free) == (0, 8)


def test_what_is_read_is_not_evicted():
    pool, cache = fresh()
    filled(pool, cache, "a", [1, 2, 3, 4])
    nodes = cache.match("a", [1, 2], 2)
    cache.hold(nodes)
    assert cache.num_evictable == 1
    assert cache.evict(5) == 1
    cache.release(nodes)
    assert cache.evict(5) == 1


def test_flush_frees_read_pages_with_their_last_reader():
    pool, cache = fresh()
    filled(pool, cache, "a", [1, 2, 3, 4])
    nodes = cache.match("a", [1, 2], 2)
    cache.hold(nodes)
    cache.hold(nodes)
    cache.flush()
    assert (cache.num_pages, pool.free) == (0, 7)
    assert cache.match("a", [1, 2], 2) == []
    cache.extend("a", nodes, [1, 2, 3, 4], [nodes[0].page, *pool.take(1)])
    assert cache.num_pages == 0, "below a page that left the tree nothing can be added"
    cache.release(nodes)
    assert pool.free == 6
    cache.release(nodes)
    assert pool.free == 7


def test_drop_forgets_one_load():
    pool, cache = fresh()
    filled(pool, cache, "a", [1, 2])
    filled(pool, cache, "b", [1, 2])
    cache.drop("a")
    assert cache.match("a", [1, 2], 2) == []
    assert len(cache.match("b", [1, 2], 2)) == 1


def test_old_heap_entries_do_not_pile_up():
    pool, cache = fresh()
    filled(pool, cache, "a", [1, 2])
    nodes = cache.match("a", [1, 2], 2)
    for _ in range(1000):
        cache.hold(nodes)
        cache.release(nodes)
    assert len(cache._evictable) < 200
    assert cache.evict(1) == 1
