"""Random calls of the logical cache: it accounts for every block after each of them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_cache import SIZE, sequence

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.kv.cache import KVCache


class CacheMachine(RuleBasedStateMachine):
    """Random sequences of calls; `check` after each."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(12, SIZE)
        self.live: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.next_id = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        adapter=st.sampled_from("AB"),
        work_class=st.sampled_from([WorkClass.ONLINE, WorkClass.OFFLINE]),
    )
    def wait(self, tokens: list[int], adapter: str, work_class: WorkClass) -> None:
        seq = sequence(self.next_id, tokens, adapter, work_class=work_class)
        self.next_id += 1
        self.waiting.append(seq)
        self.cache.add_reader(seq)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        seq = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        seq.computed = self.cache.attach(seq)
        self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(1, 8))
    def extend(self, data: st.DataObject, tokens: int) -> None:
        seq = data.draw(st.sampled_from(self.live))
        tokens = min(tokens, seq.remaining)
        before = self.cache.available_blocks
        missing = self.cache.missing_blocks(seq, tokens)
        done = self.cache.try_extend(seq, tokens)
        assert (done is None) == (missing > before)
        if done is not None:
            seq.computed += tokens
            self.cache.commit(seq)

    @precondition(lambda self: any(seq.remaining for seq in self.live))
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([each for each in self.live if each.remaining]))
        full = self.cache.holders.held_by([seq]) * SIZE == seq.computed
        grows = full and self.cache.available_blocks > 0
        fits = grows or self.cache.missing_blocks(seq, 1) == 0
        held = self.cache.holders.held_by([seq])
        found = self.cache.try_slot(seq, seq.computed)
        assert (found is not None) == fits
        assert self.cache.holders.held_by([seq]) == held + grows
        if found is not None:
            assert found == self.cache.table(seq, seq.computed + 1)
            seq.computed += 1
            self.cache.commit(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def generate(self, data: st.DataObject, token: int) -> None:
        data.draw(st.sampled_from(self.live)).tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        child = sequence(self.next_id, parent.tokens, parent.adapter.content_hash)
        self.next_id += 1
        child.computed = parent.computed
        self.cache.fork(parent, child)
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), back=st.booleans())
    def release(self, data: st.DataObject, back: bool) -> None:
        seq = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.cache.release(seq)
        if back:
            seq.computed = 0
            self.waiting.append(seq)
            self.cache.add_reader(seq)

    @rule(adapter=st.sampled_from("AB"))
    def retire(self, adapter: str) -> None:
        self.cache.retire(adapter)

    @invariant()
    def accounts(self) -> None:
        self.cache.check()
        if not self.live:
            assert self.cache.held_blocks == 0


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestCacheMachine = CacheMachine.TestCase
