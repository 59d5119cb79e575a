"""Decisions of baselines that alternate: requests without training, or training without requests.

Knows no policy. Invariant: `serve` runs no training step, and `train` runs no request.
"""

from __future__ import annotations

import math

from tandem.core.decision import Candidate, Decision
from tandem.scheduling.queues import first_waiting, is_lone_score, slices_within
from tandem.scheduling.view import View

# Longest iteration of training, in seconds, so that commands are handled soon enough.
_ITERATION_S = 1.0


def serve(view: View, wake_at: float | None = None, *, pause: bool = False) -> Decision:
    """Requests by arrival, then scores. No sequence of a training step and no slice.

    Running training loses its blocks. With `pause` it loses them only to requests that arrived
    before it and need them; requests that arrived later are preempted themselves.
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


def train(
    view: View, step_ids: set[str], seconds: float = _ITERATION_S, spared_s: float = -math.inf
) -> Decision:
    """These steps as fast as possible. Requests wait and may be preempted.

    `seconds` bounds the layers of an iteration. Requests that arrived up to `spared_s` keep their
    blocks. Scores that have begun continue, since those under working parameters delay the update.
    """
    running = view.running_in_order
    steps = [step for step in view.steps if step.step_id in step_ids]
    order = [seq for seq in running if is_lone_score(seq)]
    order += [seq for step in steps for seq in step.sequences.values()]
    chosen = {seq.seq_id for seq in order}
    slices, _ = slices_within(steps, view.latency, seconds, True)
    others = [seq for seq in running if seq.seq_id not in chosen]
    return Decision.on_device(
        tuple(Candidate(seq.seq_id, may_preempt=True) for seq in order),
        slices=tuple(slices),
        victims=tuple(
            [seq.seq_id for seq in reversed(others) if seq.request.arrival_s > spared_s]
            + [seq.seq_id for seq in reversed(order)]
        ),
    )
