"""The requests of an iteration: how many rows and how much time they take, and when one is due.

Foresees what admission will grant, nearly; changes nothing. Invariant: the budget of time is never
less than what the requests themselves are predicted to take.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.sequence import Sequence
from tandem.estimators.work import PassWork
from tandem.scheduling.deadlines import Deadlines
from tandem.scheduling.view import View


@dataclass(slots=True)
class Serving:
    """Waiting requests, the rows of the running ones, the pass of all of them, and seconds until
    the first token is due."""

    queue: list[Sequence] = field(default_factory=list)
    running_rows: int = 0
    work: PassWork = field(default_factory=PassWork)
    predicted_s: float = 0.0
    due_s: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of the pass, running requests' included."""
        return self.work.tokens


def foresee(
    view: View, deadlines: Deadlines, running: list[Sequence], queue: list[Sequence]
) -> Serving:
    """Rows and time of the requests as admission will grant them, nearly; and the time budget.

    Slack that was saved up is spent in passes of up to the ceiling: few long ones cost less than
    many short ones.
    """
    deadlines.forget_ended(view)
    most, work = view.budgets.max_batch_tokens, PassWork()
    served, left = _add_requests(running, most, work)
    queued, _ = _add_requests(queue, left, work)
    due_s = deadlines.slack_s(view, running[:served] + queue[:queued])
    predicted_s = view.latency.forward_s(work)
    return Serving(queue, most - left, work, predicted_s, max(due_s, predicted_s))


def _add_requests(sequences: list[Sequence], left: int, work: PassWork) -> tuple[int, int]:
    """Add the rows of requests to `work`, `left` at most; how many take part, and what is left."""
    contexts: list[int] = []
    served = 0
    for seq in sequences:
        if left <= 0:
            break
        served += 1
        length, computed = len(seq.tokens), seq.computed
        taken = length - computed
        if taken > left:
            taken = left
        left -= taken
        if taken == 1 and computed:
            contexts.append(length)
        else:
            work.span(computed, taken, draws=int(taken == length - computed))
    work.decode_all(contexts)
    return served, left
