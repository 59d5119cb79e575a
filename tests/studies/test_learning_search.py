from __future__ import annotations

from benchmarks.learning.lessons import ByPriority, InOrder
from benchmarks.learning.search import Candidate, row
from benchmarks.learning.stream import EncodedPair


def test_candidates() -> None:
    once = Candidate.parse("once 1e-2 0.05")
    assert (once.learning_rate, once.beta, once.passes) == (0.01, 0.05, 1.0)
    assert isinstance(once.rule(8), InOrder)
    repeat = Candidate.parse("repeat 1e-2 0.05 0.4 3 2")
    assert repeat.repeats is not None and repeat.passes == 2.0
    assert (repeat.repeats.threshold, repeat.repeats.most_uses) == (0.4, 3)
    assert isinstance(repeat.rule(8), ByPriority)


def test_row_has_all_pairs_the_later_half_and_every_source() -> None:
    pairs = [
        EncodedPair(f"{n}", "even" if n % 2 == 0 else "odd", (1,), (2,), (3,)) for n in range(4)
    ]
    met = {0: (-1.0, -2.0), 1: (-2.0, -1.0), 2: (-1.0, -5.0), 3: (-1.0, -3.0)}
    assert row("x", 7, 1.2, pairs, met) == "| x | 7 | 0.750 | 1.000 | 1.50 | 1.00 | 0.50 | 1 |"
