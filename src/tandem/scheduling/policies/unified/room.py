"""What an iteration has left for learning and offline requests, and which of their work fits.

Counts rows, time, blocks and recording rows down as they are granted; decides no order. Invariant:
what is left only shrinks, so work that did not fit once does not fit later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from msgspec import Struct

from tandem.core.decision import Candidate
from tandem.core.sequence import Sequence, SequenceStatus
from tandem.estimators.latency import LatencyModel
from tandem.estimators.work import PassWork
from tandem.scheduling.queues import is_waiting
from tandem.scheduling.training import StepWork
from tandem.scheduling.view import View

# Least rows of a piece of a training forward, unless fewer are left: each piece has a fixed cost.
PIECE_TOKENS = 64


# A struct, since one is made for every step in every iteration (docs/adr/0017).
class LearningItem(Struct, gc=False):
    """A training step, or a score requested on its own."""

    priority: float
    arrival_s: float
    sequences: Collection[Sequence]
    step: StepWork | None = None
    overdue: bool = False  # starving: it goes before waiting prompts
    held: bool = False  # its update waits for a running score that reads the parameters

    @property
    def sliced(self) -> StepWork | None:
        """The step, if some of its layers or its update may run now."""
        step = self.step
        if step is None or not step.due or (self.held and step.updatable):
            return None
        return step

    def least_s(self, latency: LatencyModel) -> float:
        """Seconds of its smallest piece of work."""
        owed = next(iter(self.step.owed()), None) if self.step is not None else None
        if owed is not None:
            return latency.slice_s(owed.backward, 1)
        seq = next(iter(self.sequences), None)
        if seq is None:
            return latency.update_s()
        alone, rows = PassWork(), min(PIECE_TOKENS, seq.remaining)
        alone.span(seq.computed, rows, scored=rows, recorded=rows)
        return latency.forward_s(alone)


@dataclass(slots=True)
class Room:
    """What is left of one iteration.

    Admission stops at the first sequence that gets no slot, or no blocks, so `slots`, `blocks` and
    `most_blocks` are checked here.
    """

    latency: LatencyModel
    block_size: int
    empty: bool  # whether no sequence holds blocks
    tokens: int  # rows
    pass_s: float  # seconds for the whole pass and the slices after it
    work: PassWork  # the pass so far
    work_s: float  # its predicted seconds
    recording_rows: int
    blocks: int  # KV blocks beside those that are held
    slots: int  # for sequences that do not run yet
    full_s: float = 0.0  # a part of a forward waits until the pass may take this long
    most_blocks: float = float("inf")  # for a starving sequence; other blocks are protected
    opened: set[int] = field(default_factory=set)  # recordings that this iteration opens
    too_many: float = float("inf")  # rows from a sequence's start that do not fit

    def left_s(self) -> float:
        """Seconds left after the pass as it is now."""
        return self.pass_s - self.work_s

    def forwards(self, item: LearningItem, needed: bool) -> list[Candidate]:
        """The forwards of an item that fit, in order; with `needed`, at least one piece of them."""
        candidates: list[Candidate] = []
        if self.too_many <= 1 and not needed:
            return candidates
        begun = [seq for seq in item.sequences if not is_waiting(seq)]
        if not begun and self.slots <= 0:
            return candidates
        rest = sum([len(seq.tokens) - seq.computed for seq in item.sequences])
        # Running sequences first: they may hold blocks that others need.
        for seq in chain(begun, filter(is_waiting, item.sequences)):
            start = seq.computed
            left = len(seq.tokens) - start
            # In a pass that records already, a piece costs no more than its rows.
            least = min(left, self.block_size if self.work.recorded else PIECE_TOKENS)
            first = needed and not candidates
            if min(least, self.tokens) >= self.too_many and not first:
                break
            if is_waiting(seq) and not self._can_start(item, seq):
                break
            if first:
                affordable = max(least, self._affordable(start, rest, least))
            else:
                saved_up = self.work.recorded or self.pass_s >= self.full_s
                affordable = self._affordable(start, rest, least if saved_up else rest)
                if affordable < rest and not saved_up:
                    break
            taken = min(left, self.tokens, affordable)
            if taken < min(least, self.tokens) or taken <= 0:
                break
            candidates.append(Candidate(seq.seq_id, taken, item.overdue))
            self.tokens -= taken
            recorded = taken if item.step is not None else 0
            self.work.span(start, taken, scored=taken, recorded=recorded)
        if candidates:
            self.work_s = self.latency.forward_s(self.work)
        return candidates

    def serve(
        self,
        running: list[Sequence],
        waiting: Iterable[tuple[Sequence, int, int]],
        *,
        every_decode: bool,
        needed: bool,
    ) -> list[Candidate]:
        """Offline requests that fit: decodes, prompts that have begun, then those of `waiting`,
        each with the number of its cached tokens, and of the blocks that it needs.

        With `every_decode` all decodes run, whatever the time. With `needed` at least one piece
        runs.
        """
        decodes = [seq for seq in running if seq.decoding]
        fitting = min(max(0, self.tokens), len(decodes))
        if not every_decode:
            within = _most(fitting, partial(self._has_time_for, decodes))
            fitting = max(within, min(fitting, int(needed)))
        self.work.decode_all([len(seq.tokens) for seq in decodes[:fitting]])
        self.tokens -= fitting
        found = [Candidate(seq.seq_id, None, True) for seq in decodes[:fitting]]
        if fitting == len(decodes):
            begun = [(seq, seq.computed, 0) for seq in running if not seq.decoding]
            for seq, start, blocks in chain(begun, waiting if self.slots > 0 else ()):
                rows = self._prompt(seq, start, blocks, needed=needed and not found)
                if rows > 0:
                    found.append(Candidate(seq.seq_id, rows, seq.status is SequenceStatus.RUNNING))
                if rows < len(seq.tokens) - start:
                    break
        self.work_s = self.latency.forward_s(self.work)
        return found

    def leave(self, queue: list[Sequence]) -> None:
        """Subtract the slots and blocks of `queue`, the requests that start before."""
        self.slots -= len(queue)
        self.blocks -= sum([-(-len(seq.tokens) // self.block_size) for seq in queue])

    def _has_time_for(self, decodes: list[Sequence], count: int) -> bool:
        work = self.work.copy()
        work.decode_all([len(seq.tokens) for seq in decodes[:count]])
        return self.latency.forward_s(work) <= self.pass_s

    def _prompt(self, seq: Sequence, start: int, blocks: int, *, needed: bool) -> int:
        """How many rows of a prompt fit from position `start` on. Counts them as granted, with the
        `blocks` that it needs."""
        starts = is_waiting(seq)
        if starts and (self.slots <= 0 or (blocks > self.blocks and not self.empty)):
            return 0
        left = len(seq.tokens) - start

        def fits(rows: int) -> bool:
            work = self.work.copy()
            work.span(start, rows, draws=int(rows == left))
            return self.latency.forward_s(work) <= self.pass_s

        least = min(left, PIECE_TOKENS, self.tokens)
        rows = _most(min(left, self.tokens), fits)
        if rows < least:
            rows = least if needed else 0
        if rows > 0:
            self.work.span(start, rows, draws=int(rows == left))
            self.tokens -= rows
            self.blocks -= blocks
            self.slots -= starts
        return rows

    def _affordable(self, start: int, rest: int, least: int) -> int:
        """How many of `rest` rows from position `start` on there is time for; 0 if there is none
        for `least`, which takes one prediction to find out."""
        most = min(rest, self.tokens)
        least = min(least, most)
        rows = self.latency.rows_within(self.work, start, most, self.pass_s, least)
        if start == 0 and rows < most:
            self.too_many = min(self.too_many, max(rows + 1, least))
        return rows

    def _can_start(self, item: LearningItem, seq: Sequence) -> bool:
        """Whether blocks and recording rows seem to be free for it. Counts them as granted."""
        if self.slots <= 0:
            return False
        blocks = -(-len(seq.tokens) // self.block_size)
        if item.overdue and blocks > self.most_blocks:
            return False
        if blocks > self.blocks and not item.overdue and not self.empty:
            return False
        record = seq.scoring.record if seq.scoring is not None else None
        if item.step is not None and record is not None and record.micro_batch not in self.opened:
            batch = item.step.micro_batch_of(record)
            if not batch.opened:
                if batch.rows > self.recording_rows:
                    return False
                self.recording_rows -= batch.rows
            self.opened |= {each.number for each in batch.recordings}
        self.blocks -= blocks
        self.slots -= 1
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


def half_computed(items: Iterable[LearningItem]) -> list[Sequence]:
    """Starving sequences that keep their blocks. Those without computed tokens lose nothing."""
    return [seq for item in items if item.overdue for seq in item.sequences if seq.computed]


def most_blocks(view: View, kept: list[Sequence]) -> float:
    """Most blocks for a new sequence while these keep theirs and each grows by one block."""
    return view.num_blocks - view.blocks_of(kept) - len(kept) if kept else float("inf")


def stands_in_the_way(
    view: View, items: Iterable[LearningItem], serving: list[Sequence], first: Sequence
) -> bool:
    """Whether half-computed starving learning leaves no place for `first`, the first waiting
    request beside those of `serving`, even if all other sequences are preempted."""
    kept = half_computed(items)
    if not kept:
        return False
    staying = {seq.seq_id for seq in (*serving, *kept)}
    yielding = [
        seq
        for seq in view.running
        if seq.seq_id not in staying and (seq.scoring is None or seq.scoring.private)
    ]
    needed = -(-len(first.tokens) // view.block_size) + len(staying)
    short = needed > view.available_blocks + view.blocks_of(yielding)
    return short or len(staying) >= view.budgets.max_sequences
