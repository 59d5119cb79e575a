"""Retraining first: whole steps in order of arrival. Inference runs when no step is left.

The baseline that MACE names after AdaInf (Shubha and Shen, SIGCOMM 2023). The model is as fresh as
possible, at the expense of requests that wait.
"""

from __future__ import annotations

from tandem.core.decision import Decision
from tandem.scheduling.retraining import serve, train
from tandem.scheduling.view import Policy, Traits, View


def create() -> Policy:
    """The policy of this file."""
    return RetrainingFirst()


class RetrainingFirst:
    """Runs the oldest step alone, then the next. Requests and scores run between steps."""

    traits = Traits(decodes_alike=True)

    def decide(self, view: View) -> Decision:
        """Train the oldest step; serve if there is none."""
        steps = view.steps
        return train(view, {steps[0].step_id}) if steps else serve(view)
