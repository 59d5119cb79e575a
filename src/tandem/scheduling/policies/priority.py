"""Most urgent first: a waiting urgent request preempts running less urgent ones.

`priority` follows vLLM's convention (lower is more urgent), ties go by arrival. Preempted work
keeps its blocks in the prefix tree while nobody needs them, so it usually resumes cheaply.
Learning is less urgent than any request.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from operator import attrgetter

from tandem.core.decision import Candidate, Decision
from tandem.core.sequence import Sequence
from tandem.scheduling.queues import slices_within
from tandem.scheduling.view import Policy, View

# Backward slices in an iteration with requests (one layer at least), and in one without.
_BESIDE_S = 0.02
_ALONE_S = 0.25

# Of requests; what is scored comes after them.
_urgency: Callable[[Sequence], tuple[int, float, int]] = attrgetter(
    "request.priority", "request.arrival_s", "seq_id"
)


def create() -> Policy:
    """The policy of this file."""
    return MostUrgentFirst()


class MostUrgentFirst:
    """One order over running and waiting sequences; who comes later in it may be preempted.

    A total order (priority, arrival) rules out that two sequences preempt each other in turn.
    """

    decodes_alike = False

    def decide(self, view: View) -> Decision:
        """See the module."""
        waiting = heapq.nsmallest(view.budgets.max_sequences, view.waiting_in_order, key=_urgency)
        requests = sorted(view.serving, key=_urgency)
        scored = view.running_in_order[len(requests) :]
        first = heapq.merge(requests, waiting, key=_urgency)
        order = [*first, *scored, *view.learning_in_order]
        budget_s = _BESIDE_S if waiting or requests else _ALONE_S
        slices, _ = slices_within(view.steps, view.latency, budget_s, True)
        return Decision.on_device(
            tuple([Candidate(seq.seq_id, None, True) for seq in order]),
            slices=tuple(slices),
            victims=tuple([seq.seq_id for seq in reversed([*requests, *scored])]),
        )
