"""Blocks of running sequences, alone and together: as counted block by block."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache import compute, sequence

from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.kv.cache import KVCache

SIZE = 2


def of_class(seq_id: int, tokens: list[int], offline: bool) -> Sequence:
    kind = WorkClass.OFFLINE if offline else WorkClass.ONLINE
    request = Request(str(seq_id), tuple(tokens), SamplingParams(), work_class=kind)
    return Sequence(seq_id, request, 0, None, list(tokens))


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@settings(max_examples=200)
@given(st.lists(st.tuples(PROMPTS, st.booleans(), st.booleans(), st.booleans()), max_size=8))
def test_blocks_apart_are_those_of_one_and_those_of_several(sequences):
    cache, chosen = KVCache(200, SIZE), []
    for number, (tokens, offline, counted, ended) in enumerate(sequences):
        seq = of_class(number, tokens, offline)
        compute(cache, seq)
        if ended:
            cache.release(seq)
        elif counted:
            chosen.append(seq)
    cache.check()
    tables = [cache.table(seq, seq.computed)[0] for seq in chosen]
    holders = Counter(block for table in tables for block in table)
    found = cache.holders.apart(chosen)
    assert found.own == [sum(holders[block] == 1 for block in table) for table in tables]
    assert found.leading == [sum(holders[block] > 1 for block in table) for table in tables]
    assert found.shared == sum(count > 1 for count in holders.values())


def test_a_waiting_sequence_finds_what_the_first_classes_hold():
    cache = KVCache(20, 4)
    compute(cache, of_class(0, list(range(9)), offline=True))
    late = sequence(1, list(range(13)))
    assert cache.new_blocks(late, 13) == 2
    assert cache.new_blocks(late, 13, 1) == 4
    compute(cache, sequence(2, list(range(5))))
    assert cache.new_blocks(late, 13, 1) == 3
