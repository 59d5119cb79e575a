"""Most urgent first: a waiting request preempts running requests that are less urgent.

`priority` follows vLLM's convention: lower is more urgent. Ties go by arrival. Blocks of preempted
sequences stay in the prefix tree until they are evicted, so resuming is usually cheap. Learning is
less urgent than any request.
"""

from __future__ import annotations

from operator import attrgetter

from tandem.core.decision import Candidate, Decision
from tandem.core.sequence import Sequence
from tandem.scheduling.queues import slices_within
from tandem.scheduling.view import Policy, Traits, View

# Seconds of backward slices in an iteration with requests (at least one layer), and without.
_BESIDE_S = 0.02
_ALONE_S = 0.25
_AMONG_REQUESTS = attrgetter("request.priority", "request.arrival_s", "seq_id")


def create() -> Policy:
    """The policy of this file."""
    return MostUrgentFirst()


class MostUrgentFirst:
    """One order over running and waiting sequences. A sequence may preempt those after it.

    The order (priority, arrival) is total, so two sequences never preempt each other in turn.
    """

    traits = Traits(heeds_priority=True)

    def decide(self, view: View) -> Decision:
        """All sequences by urgency, then learning that waits."""
        waiting = sorted(view.waiting, key=_AMONG_REQUESTS)[: view.budgets.max_sequences]
        running = sorted(view.running, key=_urgency)
        order = [*sorted([*running, *waiting], key=_urgency), *view.learning_in_order]
        alone = not waiting and all(seq.scoring is not None for seq in running[:1])
        budget_s = _ALONE_S if alone else _BESIDE_S
        slices, _ = slices_within(view.steps, view.latency, budget_s, True)
        return Decision.on_device(
            tuple(Candidate(seq.seq_id, may_preempt=True) for seq in order),
            slices=tuple(slices),
            victims=tuple(seq.seq_id for seq in reversed(running)),
        )


def _urgency(seq: Sequence) -> tuple[bool, int, float, int]:
    request = seq.request
    return (seq.scoring is not None, request.priority, request.arrival_s, seq.seq_id)
