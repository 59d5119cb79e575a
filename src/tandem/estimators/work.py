"""The amount of work of a forward pass or a backward slice: the numbers its time depends on.

Counts only; knows no seconds. Invariant: a row of a pass is either a decode or one of `rows`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tandem.core.plan import KeptLayers, LanePlan, Span


@dataclass(slots=True)
class PassWork:
    """Work of one pass. Mutable, so that a policy can add to it."""

    decodes: int = 0  # sequences with one row each
    context: int = 0  # tokens of KV that all decodes read
    longest: int = 0  # tokens of KV that the longest of them reads
    rows: int = 0  # of prompts and training
    pairs: int = 0  # positions that these rows attend to, summed over rows
    prefix: int = 0  # tokens of KV before them, summed over spans
    draws: int = 0  # rows that are sampled from
    scored: int = 0
    recorded: int = 0  # rows recorded for a backward
    # Whether it only has micro-batches that it opens and records to their ends; more is kept of
    # these. Known from plans only, not from a policy's candidates.
    whole: bool = False

    @property
    def tokens(self) -> int:
        """All rows of the pass."""
        return self.decodes + self.rows

    def decode(self, context: int) -> None:
        """Add a sequence that draws one token after `context` tokens."""
        self.decodes += 1
        self.draws += 1
        self.context += context
        self.longest = max(self.longest, context)

    def decode_all(self, contexts: list[int]) -> None:
        """Add one sequence as with `decode` for each of `contexts`."""
        if contexts:
            self.decodes += len(contexts)
            self.draws += len(contexts)
            self.context += sum(contexts)
            self.longest = max(self.longest, *contexts)

    def span(
        self, start: int, rows: int, *, draws: int = 0, scored: int = 0, recorded: int = 0
    ) -> None:
        """Add positions `[start, start + rows)` of a prompt or of a training sequence."""
        self.rows += rows
        self.pairs += pairs_of(start, rows)
        self.prefix += start
        self.draws += draws
        self.scored += scored
        self.recorded += recorded

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans of a plan."""
        contexts: list[int] = []
        for span in spans:
            rows, targets = len(span.tokens), span.score_targets
            if rows == 1 and span.draws and not targets:
                contexts.append(span.start + 1)
                self.draws += len(span.draws) - 1
                continue
            self.span(
                span.start,
                rows,
                draws=len(span.draws),
                scored=sum([target >= 0 for target in targets]),
                recorded=rows if span.record is not None else 0,
            )
        self.decode_all(contexts)

    def copy(self) -> PassWork:
        """A copy that can be extended separately."""
        return PassWork(
            self.decodes,
            self.context,
            self.longest,
            self.rows,
            self.pairs,
            self.prefix,
            self.draws,
            self.scored,
            self.recorded,
            self.whole,
        )

    @staticmethod
    def of(lane: LanePlan) -> PassWork:
        """The work of a plan's forward pass."""
        work = PassWork()
        work.add(lane.spans)
        if work.recorded and work.recorded == work.tokens:
            opened = {each.micro_batch: sum(each.lengths) for each in lane.opens}
            recorded = Counter[int]()
            for span in lane.spans:
                if span.record is not None:
                    recorded[span.record.micro_batch] += len(span.tokens)
            work.whole = all(opened.get(number) == rows for number, rows in recorded.items())
        return work


@dataclass(frozen=True, slots=True)
class BackwardWork:
    """The backward of a recording.

    It does not say which layers are recomputed: a slice is predicted with the mean. Nor does it say
    what is dropped later, for memory or because a sequence has no coefficient.
    """

    rows: int
    sequences: int
    pairs: int  # positions that its rows attend to, in all
    again: float = 1.0  # share of layers whose whole forward is recomputed
    rest: float = 0.0  # share of layers of which only the part that is not kept is recomputed
    begun: bool = False  # the first slice, which has more work, is done

    @staticmethod
    def of(
        lengths: Sequence[int], again: float = 1.0, rest: float = 0.0, *, begun: bool = False
    ) -> BackwardWork:
        """For sequences with these numbers of rows. By default nothing is known to be kept."""
        pairs = sum([pairs_of(0, rows) for rows in lengths])
        return BackwardWork(sum(lengths), len(lengths), pairs, again, rest, begun)

    def with_kept(self, kept: KeptLayers) -> BackwardWork:
        """The same with this kept."""
        again = max(0.0, 1.0 - kept.whole - kept.inner)
        return replace(self, again=again, rest=kept.inner)

    def after_slice(self) -> BackwardWork:
        """The same after a slice was computed."""
        return self if self.begun else replace(self, begun=True)


def pairs_of(start: int, rows: int) -> int:
    """(row, attended position) pairs of positions `[start, start + rows)` under a causal mask."""
    return rows * start + rows * (rows + 1) // 2
