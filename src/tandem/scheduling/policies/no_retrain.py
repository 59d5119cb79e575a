"""Serves and never trains: the baseline that shows what learning is worth (MACE, figures 2 and 9).

Requests as under `fcfs`; scores (evaluation) run behind them. Training steps wait for ever, until
they are cancelled.
"""

from __future__ import annotations

import math

from tandem.core.decision import Candidate, Decision
from tandem.scheduling.queues import first_waiting, is_lone_score
from tandem.scheduling.view import Policy, View


def create() -> Policy:
    """The policy of this file."""
    return NoRetraining()


class NoRetraining:
    """Order of arrival without training."""

    decodes_alike = True
    records_in_parts = False

    def decide(self, view: View) -> Decision:
        """See the module."""
        return serve(view)


def serve(view: View, wake_at: float | None = None, *, pause: bool = False) -> Decision:
    """Requests by arrival, then scores; no sequence of a training step, no slice.

    Training that has begun loses its blocks; with `pause` only to those that came before it, when
    they need them: whoever came later gives way itself.
    """
    running = view.running_in_order
    free_slots = view.budgets.max_sequences - len(running)
    queue = first_waiting(view, max(0, free_slots) + 1)
    scores = [seq for seq in view.learning_in_order if is_lone_score(seq)]
    training = [seq for seq in running if seq.scoring is not None and not is_lone_score(seq)]
    served = [seq for seq in running if seq.scoring is None or is_lone_score(seq)]
    paused = pause and bool(training)
    began_s = training[0].request.arrival_s if paused else math.inf
    candidates = [Candidate(seq.seq_id, None, seq.request.arrival_s <= began_s) for seq in served]
    for seq in queue:
        candidates.append(Candidate(seq.seq_id, None, paused and seq.request.arrival_s <= began_s))
    candidates += [Candidate(seq.seq_id) for seq in scores]
    return Decision.on_device(
        tuple(candidates),
        victims=tuple([seq.seq_id for seq in reversed(running)]),
        preempt=() if pause else tuple([seq.seq_id for seq in training]),
        wake_at=wake_at,
    )
