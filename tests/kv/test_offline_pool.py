"""The pool of waiting offline requests: which request of each bucket has the longest cached prefix.

That it stays right under any sequence of calls, the state machine of `test_cache` checks.
"""

from __future__ import annotations

from test_cache import SIZE, compute, sequence

from tandem.core.slo import WorkClass
from tandem.kv.cache import KVCache


def offline(seq_id: int, tokens: list[int], adapter: str | None = None):
    return sequence(seq_id, tokens, adapter, work_class=WorkClass.OFFLINE)


def best(cache: KVCache) -> list[tuple[int, int]]:
    return [(each.seq.seq_id, each.cached_tokens) for each in cache.offline.best_of_buckets()]


def test_the_oldest_comes_first_while_nothing_is_cached():
    cache = KVCache(20, SIZE)
    for number in range(3):
        cache.add_reader(offline(number, [number] * 9))
    assert best(cache) == [(0, 0)] and len(cache.offline) == 3


def test_the_longest_cached_prefix_is_found_and_followed_as_blocks_come_and_go():
    cache = KVCache(4, SIZE)
    document = [1] * 8
    cache.add_reader(offline(0, [0] * 12))
    cache.add_reader(shares := offline(1, [*document, 2, 2, 2, 2]))
    compute(cache, first := offline(2, [*document, 3, 3]))
    assert best(cache) == [(1, 8)]
    cache.release(first)
    compute(cache, sequence(3, [4] * 12))  # one of the document's blocks has to go
    assert best(cache) == [(1, 4)]
    cache.remove_reader(shares)
    assert best(cache) == [(0, 0)]
    cache.check()


def test_each_bucket_has_prompts_of_one_length():
    cache = KVCache(20, SIZE)
    compute(cache, offline(9, [1] * 8))
    cache.add_reader(offline(0, [1] * 6))
    cache.add_reader(offline(1, [1] * 30))
    cache.add_reader(offline(2, [5] * 30))
    assert best(cache) == [(0, 4), (1, 8)]


def test_only_offline_requests_are_in_it_once_and_nothing_is_shared_between_adapters():
    cache = KVCache(20, SIZE)
    compute(cache, offline(9, [1] * 8, "A"))
    cache.add_reader(sequence(0, [1] * 8))
    assert best(cache) == []
    cache.add_reader(other := offline(1, [1] * 9, "B"))
    cache.add_reader(other)
    assert best(cache) == [(1, 0)]
    cache.add_reader(offline(2, [1] * 9, "A"))
    assert best(cache) == [(2, 8)]


def test_a_start_that_failed_costs_no_place():
    cache = KVCache(20, SIZE)
    sequences = [offline(number, [number] * 9) for number in range(3)]
    for seq in sequences:
        cache.add_reader(seq)
    cache.attach(sequences[0])
    cache.release(sequences[0], used=False)
    cache.add_reader(sequences[0])
    assert best(cache) == [(0, 0)]


def test_several_with_the_longest_prefix_are_offered_or_the_oldest():
    cache = KVCache(20, SIZE)
    for number in range(4):
        cache.add_reader(offline(number, [1, 1, 1, 1, number, 0, 0, 0, 0]))
    cache.add_reader(offline(4, [7] * 9))
    found = [(each.seq.seq_id, each.cached_tokens) for each in cache.offline.best_of_buckets(3)]
    assert found == [(0, 0), (1, 0), (2, 0)]
    compute(cache, offline(9, [1] * 5))
    found = [(each.seq.seq_id, each.cached_tokens) for each in cache.offline.best_of_buckets(9)]
    assert found == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 0)]


def test_blocks_that_were_not_used_keep_their_class_and_age():
    cache = KVCache(20, SIZE)
    compute(cache, seq := offline(0, [1] * 9))
    cache.release(seq)
    before = cache.idle_blocks()
    cache.attach(refused := sequence(1, [1] * 9))
    cache.release(refused, used=False)
    assert [(each.online, each.last_access > 0) for each in before] == [
        (each.online, each.last_access > 0) for each in cache.idle_blocks()
    ]
    assert not any(each.online for each in cache.idle_blocks())


def test_without_prefix_caching_the_oldest_is_offered():
    cache = KVCache(20, SIZE, prefix_caching=False)
    cache.add_reader(offline(0, [0] * 9))
    compute(cache, offline(9, [1] * 8))
    cache.add_reader(offline(1, [1] * 9))
    assert best(cache) == [(0, 0)]


def test_one_with_a_prefix_of_its_own_does_not_hide_the_others():
    """It was preempted, and its blocks are the deepest."""
    cache = KVCache(20, SIZE)
    compute(cache, long := offline(0, [1] * 4 + [2] * 8))
    cache.release(long)
    cache.add_reader(long)
    cache.add_reader(offline(1, [9] * 9))
    for number in (2, 3):
        cache.add_reader(offline(number, [1] * 4 + [number + 2] * 5))
    for _ in range(2):
        found = [(each.seq.seq_id, each.cached_tokens) for each in cache.offline.best_of_buckets(3)]
        assert found == [(0, 8), (2, 4), (3, 4)]
        cache.check()
    found = [(each.seq.seq_id, each.cached_tokens) for each in cache.offline.best_of_buckets(8)]
    assert found == [(0, 8), (2, 4), (3, 4), (1, 0)]


def test_a_long_prefix_of_one_request_ends_the_search_and_the_others_come_by_arrival():
    cache = KVCache(100, SIZE)
    compute(cache, long := offline(0, list(range(4 * 90))))
    cache.release(long)
    cache.add_reader(long)
    for number in (1, 2):
        cache.add_reader(offline(number, [*range(4), *[1000 + number] * 300]))
    found = [each.seq.seq_id for each in cache.offline.best_of_buckets(8)]
    assert found == [0, 1, 2] and best(cache) == [(0, 356)]
