"""Retraining first, in order of arrival, whole steps; inference when none is left.

The baseline that MACE names after AdaInf (Shubha and Shen, SIGCOMM 2023): the freshest model, at
the expense of whoever waits for an answer.
"""

from __future__ import annotations

import math

from tandem.core.decision import Candidate, Decision
from tandem.scheduling.policies.no_retrain import serve
from tandem.scheduling.queues import is_lone_score, slices_within
from tandem.scheduling.view import Policy, View

# An iteration of training may take so long, so that commands are still heard.
_ITERATION_S = 1.0


def create() -> Policy:
    """The policy of this file."""
    return RetrainingFirst()


class RetrainingFirst:
    """The oldest step alone, then the next; requests run between, and scores with them."""

    decodes_alike = True
    records_in_parts = False

    def decide(self, view: View) -> Decision:
        """See the module."""
        steps = view.steps
        return train(view, {steps[0].step_id}) if steps else serve(view)


def train(
    view: View, step_ids: set[str], seconds: float = _ITERATION_S, spared_s: float = -math.inf
) -> Decision:
    """These steps as fast as possible, at anybody's expense; requests wait.

    `seconds` bound the layers of an iteration. Requests that came up to `spared_s` keep their
    blocks. Scores that have begun go on: under working parameters they hold up the update.
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
