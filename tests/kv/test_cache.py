"""The logical cache: sharing, eviction order, readers, copy-on-write, and its own accounting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import AccountingError
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import Scoring, Sequence
from tandem.core.slo import WorkClass
from tandem.core.version import AdapterVersion
from tandem.kv.cache import KVCache
from tandem.kv.eviction import ByClass, LeastRecentlyUsed

SIZE = 4


def sequence(seq_id: int, tokens: list[int], adapter: str | None = None, **request) -> Sequence:
    version = AdapterVersion("a", 1, adapter, "") if adapter else None
    asked = Request(f"r{seq_id}", tuple(tokens), SamplingParams(), **request)
    return Sequence(seq_id, asked, 0, version, list(tokens))


def compute(cache: KVCache, seq: Sequence) -> None:
    """Attach, extend and commit the whole sequence."""
    seq.computed = cache.attach(seq)
    assert cache.try_extend(seq, seq.remaining) is not None
    seq.computed = len(seq.tokens)
    cache.commit(seq)


def test_equal_prefixes_share_blocks_and_the_last_token_is_computed():
    cache = KVCache(10, SIZE)
    first, second = sequence(0, list(range(8))), sequence(1, list(range(8)))
    compute(cache, first)
    assert cache.match(second) == 4  # not 8: the last token's logits are needed
    compute(cache, second)
    assert cache.table(first, 4) == cache.table(second, 4)
    assert cache.held_blocks == 2, "the second block was computed twice and is kept once"
    cache.check()


def test_nothing_is_shared_without_prefix_caching():
    cache = KVCache(10, SIZE, prefix_caching=False)
    compute(cache, sequence(0, list(range(8))))
    compute(cache, sequence(1, list(range(8))))
    assert cache.held_blocks == 4


@pytest.mark.parametrize("other", [{"adapter": "B"}, {"tenant": "other"}, {"adapter": None}])
def test_adapters_and_tenants_are_apart(other):
    cache = KVCache(10, SIZE)
    compute(cache, sequence(0, list(range(8)), "A"))
    assert cache.match(sequence(1, list(range(8)), **({"adapter": "A"} | other))) == 0
    assert cache.match(sequence(1, list(range(8)), "A")) == 4


def test_held_blocks_are_counted_for_the_most_urgent_of_their_holders():
    cache = KVCache(20, SIZE)
    online = sequence(0, list(range(9)))
    offline = sequence(1, [*range(8), 20, 21, 22], work_class=WorkClass.OFFLINE)
    scored = sequence(2, [*range(8), 30, 31])
    scored = Sequence(2, scored.request, 0, None, scored.tokens, scoring=Scoring((), None))
    compute(cache, offline)
    assert cache.held_by_rank == [0, 3, 0]
    compute(cache, scored)
    assert cache.held_by_rank == [0, 3, 1]
    compute(cache, online)
    assert cache.held_by_rank == [3, 1, 1], "the shared prefix is now that of the online request"
    cache.check()
    cache.release(online)
    assert cache.held_by_rank == [0, 3, 1]
    cache.release(offline)
    cache.release(scored)
    assert cache.held_by_rank == [0, 0, 0]
    cache.check()


def test_the_least_recently_used_goes_first_leaves_before_parents():
    cache = KVCache(4, SIZE)
    old, new = sequence(0, list(range(9))), sequence(1, [9] * 5)
    for seq in (old, new):
        compute(cache, seq)
        cache.release(seq)
    assert cache.cached_blocks == 3
    compute(cache, sequence(2, [7] * 8))  # one free block, one evicted
    assert cache.match(sequence(3, list(range(9)))) == 4, "the leaf of the older went, not its root"
    assert cache.match(sequence(4, [9] * 5)) == 4
    cache.check()


def test_blocks_with_a_future_reader_outlive_younger_ones():
    cache = KVCache(4, SIZE)
    for number, token in enumerate((1, 2)):
        seq = sequence(number, [token] * 8)
        compute(cache, seq)
        cache.release(seq)
    cache.add_reader(waiting := sequence(2, [1] * 9))
    compute(cache, sequence(3, [5] * 8))
    assert cache.match(waiting) == 8
    cache.remove_reader(waiting)
    cache.check()


def test_readers_follow_a_growing_tree():
    cache = KVCache(8, SIZE)
    cache.add_reader(waiting := sequence(0, [1] * 13))
    compute(cache, seq := sequence(1, [1] * 12))
    cache.release(seq)
    cache.check()
    compute(cache, other := sequence(2, [2] * 16))
    cache.release(other)
    compute(cache, sequence(3, [3] * 20))
    assert cache.match(waiting) == 12, "the younger blocks went, for nobody waits for them"
    cache.check()


def test_retired_versions_go_first_and_dropped_ones_at_once():
    cache = KVCache(4, SIZE)
    for number, adapter in enumerate(("old", "new")):
        seq = sequence(number, [1] * 8, adapter)
        compute(cache, seq)
        cache.release(seq)
    cache.retire("new")  # although it was used last
    compute(cache, sequence(2, [5] * 8))
    assert cache.match(sequence(3, [1] * 9, "old")) == 8
    assert cache.match(sequence(4, [1] * 9, "new")) == 0
    cache.drop_adapter("old")
    assert cache.cached_blocks == 0
    cache.check()


def test_forks_copy_only_the_tail_and_only_once():
    cache = KVCache(10, SIZE)
    parent = sequence(0, list(range(6)))
    compute(cache, parent)
    children = [sequence(n, list(range(6))) for n in (1, 2)]
    for child in children:
        child.computed = parent.computed
        cache.fork(parent, child)
    assert cache.held_blocks == 2
    copies = []
    for seq in (parent, *children):
        seq.tokens.append(seq.seq_id)
        copies += cache.try_extend(seq, 1)
    assert len(copies) == 2 and len({copy.target for copy in copies}) == 2
    assert cache.held_blocks == 4
    cache.check()


def test_a_full_cache_says_no_and_changes_nothing():
    cache = KVCache(2, SIZE)
    seq = sequence(0, list(range(6)))
    compute(cache, seq)
    late = sequence(1, [9] * 3)
    late.computed = cache.attach(late)
    assert cache.try_extend(late, 3) is None
    assert cache.fitting_tokens(late) == 0
    cache.check()


def test_a_decode_takes_a_block_that_is_free_or_cached_but_from_nobody():
    cache = KVCache(3, SIZE)
    compute(cache, seq := sequence(0, list(range(SIZE))))
    compute(cache, other := sequence(1, [9] * 2 * SIZE))
    seq.tokens.append(7)
    assert cache.try_slot(seq, seq.computed) is None
    assert cache.held_blocks == 3
    cache.release(other)
    found = cache.try_slot(seq, seq.computed)
    assert found is not None and len(found[0]) == 2
    assert (cache.held_blocks, cache.cached_blocks, cache.counters.evictions_blocks) == (2, 1, 1)
    cache.check()


def fill(cache: KVCache, seq_id: int, num_blocks: int) -> Sequence:
    """Hold `num_blocks` more blocks that nobody else can use."""
    tokens = [1000 + seq_id] * (num_blocks * SIZE)
    compute(cache, seq := sequence(seq_id, tokens, tenant=f"filler {seq_id}"))
    return seq


def test_a_wished_order_takes_effect_only_where_blocks_are_needed():
    cache = KVCache(4, SIZE)
    for number in (0, 1, 2):
        compute(cache, seq := sequence(number, [number] * 4))
        cache.release(seq)
    held = sequence(3, [2] * 5)
    compute(cache, held)  # the block of the third, and the last free one
    order = [block.block for block in reversed(cache.idle_blocks())]
    cache.evict_first((cache.table(held, 4)[0][0], 99, *order))
    assert cache.cached_blocks == 2, "nothing goes before its room is needed"
    fill(cache, 4, 1)
    assert [block.block for block in cache.idle_blocks()] == order[1:]
    assert cache.match(sequence(5, [2] * 5)) == 4, "it is held"
    cache.check()


def test_a_wished_order_ends_with_the_next_one():
    cache = KVCache(2, SIZE)
    for number in (0, 1):
        compute(cache, seq := sequence(number, [number] * 4))
        cache.release(seq)
    young = max(cache.idle_blocks(), key=lambda block: block.last_access)
    cache.evict_first((young.block,))
    cache.evict_first(())
    fill(cache, 2, 1)
    assert cache.idle_blocks() == [young]


def test_what_becomes_idle_after_the_first_eviction_follows_the_wished_order_too():
    cache = KVCache(3, SIZE)
    for number in (0, 1):
        compute(cache, seq := sequence(number, [number] * 4))
        cache.release(seq)
    compute(cache, late := sequence(2, [2] * 4))
    blocks = {block.last_access: block.block for block in cache.idle_blocks()}
    cache.evict_first((blocks[min(blocks)], cache.table(late, 4)[0][0]))
    fill(cache, 3, 1)
    cache.release(late)
    fill(cache, 4, 1)
    assert [block.block for block in cache.idle_blocks()] == [blocks[max(blocks)]]


@settings(max_examples=100)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=6),
    data=st.data(),
)
def test_blocks_leave_in_the_wished_order_then_in_the_caches_own(prompts, data):
    """Each prompt is some blocks of equal tokens, so that they share beginnings; all are idle."""
    cache = KVCache(24, SIZE)
    for number, blocks in enumerate(prompts):
        compute(cache, seq := sequence(number, [each for each in blocks for _ in range(SIZE)]))
        cache.release(seq)
    there = [block.block for block in cache.idle_blocks()]
    wish = data.draw(st.permutations([*there, 98, 99]))
    wish = wish[: data.draw(st.integers(0, len(wish)))]
    fill(cache, 50, cache.free_blocks)
    cache.evict_first(tuple(wish))
    while idle := {block.block: block for block in cache.idle_blocks()}:
        leaves = [block for block in idle.values() if block.leaf]
        wished = [block for block in wish if block in {leaf.block for leaf in leaves}]
        oldest = min(leaves, key=lambda leaf: leaf.last_access)
        fill(cache, 100 + len(idle), 1)
        gone = idle.keys() - {block.block for block in cache.idle_blocks()}
        assert gone == {wished[0] if wished else oldest.block}
        cache.check()


def test_private_sequences_neither_find_nor_leave_anything():
    cache = KVCache(16, 4)
    public = sequence(0, list(range(12)))
    compute(cache, public)
    cache.release(public)
    private = sequence(1, list(range(12)))
    private.scoring = Scoring((-1,) * 12, trainer="t")
    cache.add_reader(private)
    assert cache.match(private) == 0
    compute(cache, private)
    assert private.computed == 12 and cache.cached_blocks == 3
    cache.release(private)
    cache.check()
    assert cache.cached_blocks == 3 and cache.held_blocks == 0
    assert cache.counters.hits_tokens == 0


def test_what_a_preempted_answer_finds_again_is_no_hit():
    cache = KVCache(16, 4)
    seq = sequence(0, list(range(12)))
    compute(cache, seq)
    for preemptions, counted in ((1, (0, 0)), (0, (12, 8))):
        seq.preemptions = preemptions
        cache.release(seq)
        seq.computed = 0
        seq.computed = cache.attach(seq)
        cache.counters.count_lookup(seq, seq.computed)
        assert seq.computed == 8
        assert (cache.counters.queries_tokens, cache.counters.hits_tokens) == counted


def test_positions_to_be_scored_are_never_taken_from_the_cache():
    cache = KVCache(16, 4)
    public = sequence(0, list(range(13)))
    compute(cache, public)
    cache.release(public)
    scored = sequence(1, list(range(13)))
    scored.scoring, scored.scored = Scoring((-1,) * 6 + (1,) * 7), 7  # row 6 says what 7 is
    assert cache.match(scored) == 4
    scored.scored = 11  # up to there it has been scored before it was preempted
    assert cache.match(scored) == 8


def test_all_groups_of_a_table_move_together():
    cache = KVCache(6, SIZE, groups=2)
    compute(cache, seq := sequence(0, list(range(6))))
    assert [len(group) for group in cache.table(seq, 6)] == [2, 2]
    cache.release(seq)
    cache.check()


def test_check_notices_a_lost_block():
    cache = KVCache(4, SIZE)
    compute(cache, sequence(0, list(range(6))))
    cache.check()
    cache._tables[0].groups[0].pop()
    with pytest.raises(AccountingError):
        cache.check()


def test_least_recently_used_does_not_heed_readers():
    cache = KVCache(3, SIZE, eviction=LeastRecentlyUsed())
    compute(cache, old := sequence(0, [1] * 4))
    compute(cache, young := sequence(1, [2] * 4))
    for seq in (old, young):
        cache.release(seq)
    cache.add_reader(waiting := sequence(2, [1] * 5))
    compute(cache, sequence(3, [3] * 8))
    assert cache.match(waiting) == 0, "its block was the oldest"
    assert cache.match(sequence(4, [2] * 5)) == 4


def test_echo_evicts_by_class_and_readers():
    """Offline without readers, then what an online request left, then by the number of readers."""
    cache = KVCache(10, SIZE, eviction=ByClass())
    offline = {"work_class": WorkClass.OFFLINE}
    left = {
        "wanted by two": sequence(0, [0] * 4, **offline),
        "wanted": sequence(1, [1] * 4, **offline),
        "online": sequence(2, [2] * 4),
        "offline": sequence(3, [3] * 4, **offline),
    }
    for seq in left.values():
        compute(cache, seq)
        cache.release(seq)
    for number, first in enumerate((0, 0, 1)):
        cache.add_reader(sequence(10 + number, [first] * 5, **offline))
    assert [cache.wanted_evictions(blocks) for blocks in (6, 8, 9, 10)] == [0, 0, 1, 2]
    gone = []
    for number in range(10):
        compute(cache, sequence(20 + number, [9, number, 0, 0]))
        gone += [
            name
            for name, seq in left.items()
            if name not in gone and not cache.match(sequence(99, [*seq.tokens, 0]))
        ]
    assert gone == ["offline", "online", "wanted", "wanted by two"]
