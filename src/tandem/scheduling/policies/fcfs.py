"""First come, first served, with running sequences before waiting ones.

Decodes go on, then prompts in order of arrival (chunked into what the token budget leaves). When
blocks run out, the latest arrival gives way. This is the continuous batching of Orca and vLLM.
"""

from __future__ import annotations

from itertools import islice

from tandem.core.decision import Candidate, Decision
from tandem.core.sequence import Sequence
from tandem.scheduling.view import Policy, View


def create() -> Policy:
    """The policy of this file."""
    return FirstComeFirstServed()


class FirstComeFirstServed:
    """Order of arrival; a running sequence may displace later arrivals, a waiting one nobody."""

    def decide(self, view: View) -> Decision:
        """See the module."""
        running = sorted(view.running, key=_arrival)
        free_slots = view.budgets.max_sequences - len(running)
        # A preempted sequence or a later choice arrived before others that wait: sort only if
        # there is one.
        queue = list(islice(view.waiting, max(0, free_slots) + 1))
        if any(seq.preemptions or seq.index for seq in view.waiting):
            queue = sorted(view.waiting, key=_arrival)[: max(0, free_slots) + 1]
        candidates = [Candidate(seq.seq_id, may_preempt=True) for seq in running]
        candidates += [Candidate(seq.seq_id) for seq in queue]
        victims = tuple(seq.seq_id for seq in reversed(running))
        return Decision.on_device(tuple(candidates), victims=victims)


def _arrival(seq: Sequence) -> tuple[float, int]:
    return (seq.request.arrival_s, seq.seq_id)
