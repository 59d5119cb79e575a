"""What the last iterations did, by kind of work: for the page, for metrics, for a trace.

Knows plans and results, no clock: its caller brings the times. The time of a forward pass is
divided among the kinds by their rows. Invariant: `seconds` only grow, and an iteration that was
taken is never changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile

from tandem.core.events import IterationRecord, Work
from tandem.core.plan import LanePlan, StepResult
from tandem.core.sequence import Sequence as Choice
from tandem.core.slo import WorkClass

_KEPT = 2000
_OF_PASS = (Work.DECODE, Work.PREFILL, Work.OFFLINE, Work.FORWARD)


class History:
    """The last iterations of one engine, and the seconds of each kind of work since its start."""

    def __init__(self) -> None:
        self._recent: deque[IterationRecord] = deque(maxlen=_KEPT)
        self.seconds = dict.fromkeys(Work, 0.0)

    def last(self, most: int, after: int = 0) -> tuple[IterationRecord, ...]:
        """The last iterations, `most` at most, of those after number `after`; oldest first."""
        newer = takewhile(lambda record: record.number > after, reversed(self._recent))
        return tuple(islice(newer, most))[::-1]

    def add(
        self,
        number: int,
        start_s: float,
        elapsed_s: float,
        lanes: Sequence[tuple[LanePlan, StepResult]],
        rows: Mapping[Work, int],
    ) -> None:
        """Take one iteration. `rows` are those of its passes (`rows_by_work`)."""
        layers = sum(each.hi - each.lo for _, result in lanes for each in result.slices)
        updates = sum(len(result.updates) for _, result in lanes)
        forward_s = sum(result.forward_s for _, result in lanes)
        backward_s = sum(result.backward_s for _, result in lanes)
        decode, prefill, offline, forward = (rows[work] for work in _OF_PASS)
        record = IterationRecord(
            number, start_s, elapsed_s, forward_s, backward_s, decode, prefill, offline, forward,
            layers, updates,
        )  # fmt: skip
        self._recent.append(record)
        stopped_s = sum(result.forward_s for _, result in lanes if result.stopped)
        total = sum(rows.values()) or 1
        for work in _OF_PASS:
            self.seconds[work] += (forward_s - stopped_s) * rows[work] / total
        self.seconds[Work.FORWARD] += stopped_s  # only learning stops
        self.seconds[Work.BACKWARD] += backward_s
        self.seconds[Work.HOST] += max(0.0, elapsed_s - forward_s - backward_s)


def rows_by_work(
    lanes: Sequence[tuple[LanePlan, StepResult]], known: Mapping[int, Choice]
) -> dict[Work, int]:
    """Rows of the passes that were computed, by kind. `known` are the sequences by id, as they were
    when the plans were made."""
    decode = prefill = offline = forward = 0
    for plan, result in lanes:
        for span in () if result.stopped else plan.spans:
            sequence, count = known[span.seq_id], len(span.tokens)
            if sequence.scoring is not None:
                forward += count
            elif sequence.request.work_class is WorkClass.OFFLINE:
                offline += count
            elif count == 1 and span.draws:
                decode += 1
            else:
                prefill += count
    return dict(zip(_OF_PASS, (decode, prefill, offline, forward), strict=True))
