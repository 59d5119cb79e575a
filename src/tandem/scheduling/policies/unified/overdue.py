"""Which offline request goes before online ones: the oldest, once it is starving.

By class alone, an offline request would not start while online requests keep coming, or while
learning holds the blocks that it needs. A running one would lose its blocks again and again.
Invariant: at most one request is starving at a time. While none is, every request keeps its place.
"""

from __future__ import annotations

from tandem.core.decision import Candidate
from tandem.core.sequence import Sequence, SequenceStatus
from tandem.core.slo import WorkClass
from tandem.scheduling.queues import num_online
from tandem.scheduling.view import View


class Overdue:
    """The oldest offline request that runs, or that waits if none runs, is starving once it has had
    no token for `patience_s` seconds while at least `1 / share` other sequences started, learning's
    included. It counts as starving until it ends. Then the next one may be at once.

    A waiting one goes before everything except preempted answers. A running one gets its rows and
    blocks first and is protected from preemption.
    """

    def __init__(self, share: float, patience_s: float) -> None:
        self._least_starts = 1.0 / share
        self._patience_s = patience_s
        self._overdue: Sequence | None = None
        self._oldest: Sequence | None = None  # the oldest of the others
        self._tokens = 0
        self._since_s = 0.0
        self._starts = 0
        self._learning_starts = 0  # counted so far
        self._listed: list[Sequence] = []

    @property
    def sequence(self) -> Sequence | None:
        """The starving request, if there is one."""
        return self._overdue

    def queue(self, view: View, queue: list[Sequence]) -> list[Sequence]:
        """The waiting requests in the order of their starts. Called once per decision."""
        self._watch(view)
        seq = self._overdue
        if seq is not None and seq.status is SequenceStatus.WAITING:
            first = [*view.starts.begun(), seq]
            listed = {each.seq_id for each in first}
            queue = [*first, *[each for each in queue if each.seq_id not in listed]]
        self._listed = queue
        return queue

    def serve(self, view: View, serving: list[Sequence]) -> list[Candidate]:
        """Candidates for the running requests. The starving one leaves each other one a row."""
        seq = self._running
        if seq is None:
            return [Candidate(each.seq_id, None, True) for each in serving]
        rows = max(1, view.budgets.max_batch_tokens - len(serving) + 1)
        others = [Candidate(each.seq_id, None, True) for each in serving if each is not seq]
        return [Candidate(seq.seq_id, rows, True), *others]

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """The running sequences that may be preempted."""
        seq = self._running
        return running if seq is None else [each for each in running if each is not seq]

    @property
    def kept(self) -> list[Sequence]:
        """Sequences that are protected from preemption: the starving request, if it runs."""
        return [] if self._running is None else [self._running]

    @property
    def _running(self) -> Sequence | None:
        seq = self._overdue
        return seq if seq is not None and seq.status is SequenceStatus.RUNNING else None

    def _watch(self, view: View) -> None:
        """Check whether the oldest request got a token, and mark it as starving if not for long."""
        for seq in self._listed:  # they start in order
            if seq.status is SequenceStatus.WAITING:
                break
            self._starts += 1
        self._starts += view.learning_starts - self._learning_starts
        self._learning_starts = view.learning_starts
        if self._overdue is not None and self._overdue.status is SequenceStatus.FINISHED:
            self._overdue = None
        oldest = self._find_oldest(view)
        if oldest is None or oldest is not self._oldest or len(oldest.tokens) != self._tokens:
            self._oldest, self._tokens = oldest, len(oldest.tokens) if oldest is not None else 0
            self._since_s, self._starts = view.now, 0
        elif (
            self._overdue is None
            and self._starts >= self._least_starts
            and view.now - self._since_s >= self._patience_s
        ):
            self._overdue = oldest

    def _find_oldest(self, view: View) -> Sequence | None:
        """The oldest offline request other than the starving one: of those that run, else of those
        that wait. A waiting one has no claim while others of its class go on."""
        for sequences in (view.running_in_order, view.waiting_in_order):
            place = num_online(sequences)
            if place < len(sequences) and sequences[place] is self._overdue:
                place += 1
            if place < len(sequences) and sequences[place].request.work_class is WorkClass.OFFLINE:
                return sequences[place]
        return None
