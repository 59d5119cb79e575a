"""Serves and never trains: the baseline that shows the value of learning (MACE, figures 2 and 9).

Requests run as under `fcfs`; scores (evaluation) run after them. Training steps wait until they are
cancelled.
"""

from __future__ import annotations

from tandem.core.decision import Decision
from tandem.scheduling.retraining import serve
from tandem.scheduling.view import Policy, Traits, View


def create() -> Policy:
    """The policy of this file."""
    return NoRetraining()


class NoRetraining:
    """Order of arrival without training."""

    traits = Traits(decodes_alike=True, trains=False)

    def decide(self, view: View) -> Decision:
        """Requests, then scores."""
        return serve(view)
