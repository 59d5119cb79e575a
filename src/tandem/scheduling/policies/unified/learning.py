"""Learning work by MACE's priority (4.1), and what a millisecond of it is worth.

Reads the view, changes nothing. Invariant: the order is total, so equal views give equal decisions.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from tandem.core.sequence import Sequence
from tandem.estimators.latency import LatencyModel
from tandem.estimators.work import PassWork
from tandem.scheduling.queues import is_lone_score, startable_scores
from tandem.scheduling.training import MicroBatchWork, StepWork
from tandem.scheduling.view import View

# Least rows of a piece of a forward, unless fewer are left: each piece has a fixed cost.
PIECE_TOKENS = 64
# MACE's gamma: weight of a step's urgency (its last loss) against its age in patiences.
_GAMMA = 0.3
# Urgency of a score: that of a sample whose loss is unknown (log 2).
_UNKNOWN_LOSS = 0.6931471805599453


# A struct, since one is made for every step in every iteration (docs/adr/0017).
class LearningItem(Struct, gc=False):
    """A training step, or a score requested on its own."""

    priority: float
    arrival_s: float
    sequences: Collection[Sequence]
    step: StepWork | None = None
    starving: bool = False  # it goes before waiting prompts and keeps its blocks
    held: bool = False  # its update waits for a running score that reads the parameters

    @property
    def sliced(self) -> StepWork | None:
        """The step, if some of its layers or its update may run now."""
        step = self.step
        if step is None or not step.due or (self.held and step.updatable):
            return None
        return step

    @property
    def key(self) -> object:
        """What the item is: its step, or its score."""
        return self.step if self.step is not None else next(iter(self.sequences))

    def batch_of(self, seq: Sequence) -> MicroBatchWork | None:
        """The micro-batch that records a sequence of the step."""
        record = seq.scoring.record if seq.scoring is not None else None
        return self.step.micro_batch_of(record) if self.step is not None and record else None

    def piece_s(self, latency: LatencyModel) -> float:
        """Seconds of the smallest piece of work."""
        owed = next(iter(self.step.owed()), None) if self.step is not None else None
        if owed is not None:
            return latency.slice_s(owed.backward, 1)
        seq = next(iter(self.sequences), None)
        if seq is None:
            return latency.update_s()
        alone, rows = PassWork(), min(PIECE_TOKENS, seq.remaining)
        alone.span(seq.computed, rows, scored=rows, recorded=rows)
        return latency.forward_s(alone)

    def value(self, latency: LatencyModel) -> float:
        """Trained tokens per second that the item still takes; a score's tokens count too."""
        work = PassWork()
        for seq in self.sequences:
            rows = seq.remaining
            work.span(seq.computed, rows, scored=rows, recorded=rows)
        seconds, step = latency.added_s(work) if work.rows else 0.0, self.step
        if step is None:
            return sum([len(seq.tokens) for seq in self.sequences]) / seconds
        layers = [latency.slice_s(each.backward, each.layers_left) for each in step.recordings]
        return step.step.num_tokens / (seconds + sum(layers) + latency.update_s())


def learning_items(view: View, scored: list[Sequence], patience_s: float) -> list[LearningItem]:
    """Steps and scores, the most urgent first; `scored` are the scored sequences that run."""
    now = view.now
    read = {seq.scoring.trainer for seq in scored if seq.scoring and is_lone_score(seq)}
    items = []
    for step in view.steps:
        since, held = step.arrival_s, bool(read) and step.trainer in read
        priority = (now - since) / patience_s + _GAMMA * step.urgency
        items.append(LearningItem(priority, since, step.sequences.values(), step, held=held))
    scores = [*filter(is_lone_score, scored), *startable_scores(view)]
    for seq in scores[: view.budgets.max_sequences]:
        since = seq.request.arrival_s
        priority = (now - since) / patience_s + _GAMMA * _UNKNOWN_LOSS
        items.append(LearningItem(priority, since, [seq]))
    items.sort(key=lambda item: (-item.priority, item.arrival_s))
    return items
