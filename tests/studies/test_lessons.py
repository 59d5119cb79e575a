from __future__ import annotations

from benchmarks.learning.lessons import UNSCORED_LOSS, ByPriority, InOrder, PriorityOptions


def test_in_order_every_pair_once() -> None:
    rule = InOrder(batch=2)
    for pair in range(5):
        rule.add(pair, float(pair))
    assert [rule.take(9.0, 7), rule.take(9.0, 8), rule.take(9.0, 9)] == [(0, 1), (2, 3), ()]
    rule.learnt({0: 3.0, 1: 3.0})
    rule.add(5, 9.0)
    assert rule.take(9.0, 0) == (4, 5)
    assert rule.take(9.0, 0) == ()


def test_pairs_come_back_until_they_are_learnt() -> None:
    rule = ByPriority(PriorityOptions(batch=2, threshold=0.5, most_uses=3))
    for pair in range(3):
        rule.add(pair, 0.0)
    assert rule.take(1.0, 0) == (0, 1)
    assert rule.take(1.0, 1) == ()  # 2 alone is no batch
    rule.learnt({0: 0.9, 1: 0.4})
    assert rule.take(2.0, 0) == (2, 0)  # 1 is learnt; what was never used comes first
    rule.learnt({0: 0.9, 2: 0.6})
    assert rule.take(3.0, 0) == (2, 0)
    rule.learnt({0: 0.9, 2: 0.6})  # the third use of 0
    rule.add(3, 3.0)
    assert rule.take(4.0, 0) == (3, 2)


def test_worse_and_older_pairs_first_and_few_ahead() -> None:
    options = PriorityOptions(batch=1, threshold=0.1, most_uses=9, patience_s=10.0)
    rule = ByPriority(options)
    for pair in range(3):
        rule.add(pair, float(pair))
    assert rule.take(9.0, options.ahead) == ()
    assert [rule.take(9.0, 0) for _ in range(4)] == [(0,), (1,), (2,), ()]
    rule.learnt({0: UNSCORED_LOSS, 1: 2.0, 2: UNSCORED_LOSS})
    assert [rule.take(9.0, 0) for _ in range(3)] == [(1,), (0,), (2,)]
