"""The ledger of one iteration: rows, seconds, KV blocks, sequence slots and recording rows.

Counts down what is granted; decides no order. Admission stops at the first sequence that gets no
slot, or no blocks, so both are checked here. Invariant: what is left only shrinks, so work that did
not fit once does not fit later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.core.decision import Candidate, SliceCandidate
from tandem.core.sequence import Sequence
from tandem.estimators.latency import LatencyModel
from tandem.estimators.work import PassWork
from tandem.scheduling.policies.unified.rest import LearningItem
from tandem.scheduling.queues import is_waiting, slices_within


@dataclass(slots=True)
class Ledger:
    """What is left of an iteration. The pass so far is `work`, and takes `work_s`."""

    latency: LatencyModel
    block_size: int
    empty: bool  # whether no sequence holds blocks: then one may take more than are left
    rows: int
    seconds: float  # for the whole pass and the slices after it
    blocks: float  # without a preemption
    slots: int
    recording_rows: int
    reclaimable: float  # blocks for a starving sequence: all that are not protected
    work: PassWork = field(default_factory=PassWork)
    work_s: float = 0.0
    # Only the first recorded sequence may be cut. Of a micro-batch that a pass computes alone and
    # whole, the executor keeps what the gradient needs, and need not compute it again.
    whole: bool = False
    _begins: bool = True  # whether another offline prompt may begin
    _opened: set[int] = field(default_factory=set)  # recordings that this iteration opens

    @property
    def left_s(self) -> float:
        """Seconds left after the pass as it is now."""
        return self.seconds - self.work_s

    def decodes(self, sequences: list[Sequence], *, needed: bool, timed: bool) -> list[Candidate]:
        """As many of these decodes as fit, in order, if it is `timed` in time; with `needed` at
        least one."""

        def fits(count: int) -> bool:
            work = self.work.copy()
            work.decode_all([len(seq.tokens) for seq in sequences[:count]])
            return not timed or self.latency.forward_s(work) <= self.seconds

        most = min(max(0, self.rows), len(sequences))
        count = max(_most(most, fits), min(most, int(needed)))
        self._begins &= count == len(sequences)
        self.work.decode_all([len(seq.tokens) for seq in sequences[:count]])
        self.work_s = self.latency.forward_s(self.work)
        self.rows -= count
        return [Candidate(seq.seq_id, None, True) for seq in sequences[:count]]

    def prompt(self, seq: Sequence, start: int, blocks: int, *, needed: bool) -> list[Candidate]:
        """The rows of an offline prompt that fit from position `start` on; with `needed` at least a
        block. One that waits needs so many `blocks`. It begins only if all decodes before it fit
        and all prompts before it end: those that share its prefix would compute it again."""
        starts, left = is_waiting(seq), len(seq.tokens) - start
        if starts and not (self._begins and self._place(blocks, starving=False)):
            self._begins = False
            return []

        def add(work: PassWork, rows: int) -> None:
            work.span(start, rows, draws=int(rows == left))

        rows = self._take(left, min(left, self.block_size), add, needed=needed)
        self._begins &= rows == left
        if rows and starts:
            self._hold(blocks)
        return [Candidate(seq.seq_id, rows, not starts)] if rows else []

    def forwards(self, item: LearningItem, *, needed: bool) -> list[Candidate]:
        """The forwards of an item that fit, in order; with `needed` at least a piece of them.
        Running sequences go first, since they may hold blocks that others need."""
        found: list[Candidate] = []
        trains = int(item.step is not None)
        for seq in sorted(item.sequences, key=is_waiting):
            starts, left = is_waiting(seq), seq.remaining
            blocks = -(-len(seq.tokens) // self.block_size)
            placed = not starts or self._place(blocks, starving=item.starving)
            if not placed or (starts and not self._opens(item, seq)):
                break

            def add(work: PassWork, rows: int, start: int = seq.computed) -> None:
                work.span(start, rows, scored=rows, recorded=rows * trains)

            # In a pass that records already, a piece costs no more than its rows.
            least = self.block_size
            if not self.work.recorded:
                least = item.least_rows(self.latency, self.block_size)
            elif self.whole:
                least = left
                if left > self.rows:
                    break
            rows = self._take(left, min(left, least), add, needed=needed and not found)
            if rows and starts:
                self._hold(blocks)
            if rows:
                found.append(Candidate(seq.seq_id, rows, item.starving))
            if rows < left:
                break
        return found

    def slices(self, item: LearningItem, *, needed: bool) -> list[SliceCandidate]:
        """The layers of an item, or its update, that fit; with `needed` at least one."""
        step, left_s = item.sliced, self.left_s
        found, after_s = slices_within([step] if step else [], self.latency, left_s, needed)
        self.seconds -= left_s - after_s
        return found

    def _take(
        self, left: int, least: int, add: Callable[[PassWork, int], None], *, needed: bool
    ) -> int:
        """How many of `left` rows fit, at least `least` or none. Adds them to the pass."""

        def fits(rows: int) -> bool:
            work = self.work.copy()
            add(work, rows)
            return self.latency.forward_s(work) <= self.seconds

        most = min(left, self.rows)
        least = min(least, most)
        rows = _most(most, fits) if most > 0 and fits(least) else 0
        if needed:
            rows = max(rows, least)
        if rows > 0:
            add(self.work, rows)
            self.work_s = self.latency.forward_s(self.work)
            self.rows -= rows
        return max(0, rows)

    def _place(self, blocks: int, *, starving: bool) -> bool:
        """Whether there is a slot and so many blocks for a waiting sequence."""
        fits = blocks <= (self.reclaimable if starving else self.blocks)
        return self.slots > 0 and (fits or self.empty)

    def _hold(self, blocks: int) -> None:
        self.blocks -= blocks
        self.reclaimable -= blocks
        self.slots -= 1

    def _opens(self, item: LearningItem, seq: Sequence) -> bool:
        """Whether the recording of a waiting sequence is open or fits. Once one does not fit, no
        other opens: small ones would starve it."""
        batch = item.batch_of(seq)
        if batch is None or batch.opened or batch.recordings[0].number in self._opened:
            return True
        if batch.rows > self.recording_rows:
            self.recording_rows = 0
            return False
        self._opened.add(batch.recordings[0].number)
        self.recording_rows -= batch.rows
        return True


def _most(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, or 0. Whatever is below one that fits must fit."""
    if most <= 0 or fits(most):
        return max(0, most)
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
