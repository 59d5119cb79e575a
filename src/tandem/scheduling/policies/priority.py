"""Most urgent first: a waiting urgent request preempts running less urgent ones.

`priority` follows vLLM's convention (lower is more urgent), ties go by arrival. Preempted work
keeps its blocks in the prefix tree while nobody needs them, so it usually resumes cheaply.
"""

from __future__ import annotations

import heapq

from tandem.core.decision import Candidate, Decision
from tandem.core.sequence import Sequence
from tandem.scheduling.view import Policy, View


def create() -> Policy:
    """The policy of this file."""
    return MostUrgentFirst()


class MostUrgentFirst:
    """One order over running and waiting sequences; who comes later in it may be preempted.

    A total order (priority, arrival) rules out that two sequences preempt each other in turn.
    """

    def decide(self, view: View) -> Decision:
        """See the module."""
        waiting = heapq.nsmallest(view.budgets.max_sequences, view.waiting, key=_urgency)
        running = sorted(view.running, key=_urgency)
        order = heapq.merge(running, waiting, key=_urgency)
        candidates = tuple(Candidate(seq.seq_id, may_preempt=True) for seq in order)
        return Decision.on_device(
            candidates, victims=tuple(seq.seq_id for seq in reversed(running))
        )


def _urgency(seq: Sequence) -> tuple[int, float, int]:
    return (seq.request.priority, seq.request.arrival_s, seq.seq_id)
