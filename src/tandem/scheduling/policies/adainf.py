"""Retraining first, in order of arrival, whole steps; inference when none is left.

The baseline that MACE names after AdaInf (Shubha and Shen, SIGCOMM 2023): the freshest model, at
the expense of whoever waits for an answer.
"""

from __future__ import annotations

from tandem.core.decision import Decision
from tandem.scheduling.retraining import serve, train
from tandem.scheduling.view import Policy, Traits, View


def create() -> Policy:
    """The policy of this file."""
    return RetrainingFirst()


class RetrainingFirst:
    """The oldest step alone, then the next; requests run between, and scores with them."""

    traits = Traits(decodes_alike=True)

    def decide(self, view: View) -> Decision:
        """See the module."""
        steps = view.steps
        return train(view, {steps[0].step_id}) if steps else serve(view)
