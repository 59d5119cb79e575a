"""First come, first served, with running sequences before waiting ones.

Decodes first, then prompts in order of arrival, in chunks that fit the token budget. When blocks
run out, the latest arrival is preempted. This is the continuous batching of Orca and vLLM. Learning
comes last: it starts when no request waits.
"""

from __future__ import annotations

from tandem.core.decision import Candidate, Decision
from tandem.scheduling.queues import first_waiting, slices_within
from tandem.scheduling.view import Policy, Traits, View

# Seconds of backward slices in an iteration with requests (at least one layer), and without.
_BESIDE_S = 0.02
_ALONE_S = 0.25


def create() -> Policy:
    """The policy of this file."""
    return FirstComeFirstServed()


class FirstComeFirstServed:
    """Order of arrival. A running sequence may preempt later arrivals; a waiting one, none."""

    traits = Traits(decodes_alike=True)

    def decide(self, view: View) -> Decision:
        """Running sequences, then waiting requests, then learning."""
        running = view.running_in_order
        free_slots = view.budgets.max_sequences - len(running)
        queue = first_waiting(view, max(0, free_slots) + 1)
        candidates = [Candidate(seq.seq_id, may_preempt=True) for seq in running]
        candidates += [Candidate(seq.seq_id) for seq in queue]
        candidates += [Candidate(seq.seq_id) for seq in view.learning_in_order]
        victims = tuple(seq.seq_id for seq in reversed(running))
        alone = not queue and all(seq.scoring is not None for seq in running[:1])
        budget_s = _ALONE_S if alone else _BESIDE_S
        slices, _ = slices_within(view.steps, view.latency, budget_s, True)
        return Decision.on_device(tuple(candidates), slices=tuple(slices), victims=victims)
