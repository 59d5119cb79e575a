"""So many requests at once, in an order that a policy gives: RT-LM (IV-C) and its baselines.

It may prefer requests of similar predicted length. Knows no policy. Invariant: if nothing runs, a
request starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.core.decision import Candidate, Decision
from tandem.core.sequence import Sequence
from tandem.estimators.batching import MEASURED
from tandem.scheduling.queues import is_waiting, slices_within
from tandem.scheduling.view import Traits, View

# Seconds of backward slices in an iteration with requests (at least one layer), and without.
_BESIDE_S = 0.02
_ALONE_S = 0.25
# The least part of a static batch's places that are filled: a device with fewer is mostly idle.
_FULL = 0.5

Rank = Callable[[Sequence, float], float]
"""(sequence, now) to a rank. The lowest rank starts first; equal ranks start by arrival."""


def expected_tokens(seq: Sequence) -> float:
    """RT-LM's u: the median of the whole answer's predicted length in tokens. A request of which
    nothing is known counts by its input length, as in the paper (III-B), but by no more than the
    answer may have."""
    length = seq.request.length
    if length is None:
        return float(min(seq.prompt_tokens, seq.request.sampling.max_tokens))
    return length.quantile(0.5)


def priority_point_s(seq: Sequence, phi: float) -> float:
    """Seconds from arrival to the priority point (IV-B): `phi` for each input token; if the request
    has an objective of its own, the time at which an answer of its expected length must end."""
    slo = seq.request.slo
    if slo is not None:
        return slo.ttft_s + expected_tokens(seq) * slo.tpot_s
    return phi * seq.prompt_tokens


@dataclass(frozen=True, slots=True)
class Options:
    """`batch` is the largest number of requests at once; with `static`, a batch runs to its end."""

    batch: int = field(default=8, metadata=MEASURED)
    static: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError("batch must be at least 1")


@dataclass(frozen=True, slots=True)
class Gathering:
    """Consolidation (IV-C; algorithm 1, lines 19 to 26).

    Sorts the first `factor` * `batch` requests by expected length, and starts the shortest, up to
    the first that is more than `ratio` times as long as the one before it."""

    factor: float = 1.8
    ratio: float = 1.5

    def __post_init__(self) -> None:
        if min(self.factor, self.ratio) < 1.0:
            raise ValueError("gather and ratio must be at least 1")

    def cut(self, gathered: list[Sequence], least: int, most: int) -> list[Sequence]:
        """The `least` shortest requests, then the following ones (at most `most` in all) up to the
        first that is more than `ratio` times as long as the one before it. The paper's line 22 says
        "or" where its text says that either ends the batch."""
        by_length = sorted(gathered, key=lambda seq: (expected_tokens(seq), seq.order))
        chosen = by_length[:least]
        for seq in by_length[least:most]:
            if expected_tokens(seq) > self.ratio * expected_tokens(chosen[-1]):
                break
            chosen.append(seq)
        return chosen


class BoundedBatch:
    """At most `batch` requests run at once, the first by `rank`; online ones before offline ones.

    A `static` batch runs until its longest answer ends, as in engines without continuous batching:
    that is what RT-LM and its baselines assume. Otherwise a free place is filled at once. Learning
    comes last.
    """

    traits = Traits(decodes_alike=True, waits_alike=True)

    def __init__(self, options: Options, rank: Rank, gathering: Gathering | None = None) -> None:
        self.options = options
        self._rank = rank
        self._gathering = gathering
        self._batch: list[Sequence] = []

    def decide(self, view: View) -> Decision:
        """Running requests of the batch, then new ones, then learning."""
        batch = [*view.serving, *[seq for seq in self._batch if is_waiting(seq)]]
        if not (self.options.static and batch):
            batch += self._starting(view, batch)
        self._batch = batch
        running = [seq for seq in batch if not is_waiting(seq)]
        coming = [seq for seq in batch if is_waiting(seq)]
        learning = view.running_in_order[len(view.serving) :]
        # Running learning comes before new requests: it may hold blocks that they wait for.
        rest = (*learning, *coming, *view.learning_in_order)
        candidates = [Candidate(seq.seq_id, None, True) for seq in running]
        candidates += [Candidate(seq.seq_id) for seq in rest]
        slices, _ = slices_within(view.steps, view.latency, _BESIDE_S if batch else _ALONE_S, True)
        return Decision.on_device(
            tuple(candidates),
            slices=tuple(slices),
            victims=tuple([seq.seq_id for seq in (*reversed(learning), *reversed(running))]),
        )

    def _starting(self, view: View, batch: list[Sequence]) -> list[Sequence]:
        """The requests that start now."""
        places = min(self.options.batch, view.budgets.max_sequences) - len(batch)
        if places <= 0:
            return []
        members = set(batch)
        waiting = [seq for seq in view.waiting if seq not in members]
        if self._gathering is None or len(waiting) <= places:
            return self._first(waiting, places, view.now)
        wanted = max(places, math.floor(self._gathering.factor * self.options.batch))
        first = self._first(waiting, wanted, view.now)
        # Else short offline requests would go before long online ones.
        alike = [each for each in first if each.order[0] == first[0].order[0]]
        least = math.ceil(_FULL * places) if self.options.static else places
        return self._gathering.cut(alike, least, places)

    def _first(self, waiting: list[Sequence], count: int, now: float) -> list[Sequence]:
        for seq in waiting:
            self._rank(seq, now)  # `rt_lm` updates a maximum here, before any two are compared
        ranked = sorted(waiting, key=lambda seq: (seq.order[0], self._rank(seq, now), seq.order))
        return ranked[:count]
