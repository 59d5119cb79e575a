"""What runs in the time that online requests leave: offline requests and learning.

Says which of it may run, and what a second of it is worth. Reads the view, changes nothing.
Invariant: every order is total, so equal views give equal decisions.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.estimators.latency import LatencyModel
from tandem.estimators.work import PassWork
from tandem.scheduling.queues import is_lone_score, num_online, startable_scores
from tandem.scheduling.training import MicroBatchWork, StepWork
from tandem.scheduling.view import View

# Most rows that a piece of a training forward has at least: see `LearningItem.least_rows`.
_MOST_LEAST = 64
# Most requests of one bucket that begin in an iteration: it bounds the prefixes to look up.
_MOST_BEGIN = 8
# MACE's gamma: weight of a step's urgency (its last loss) against its age in patiences.
_GAMMA = 0.3
# Urgency of a score: that of a sample whose loss is unknown (log 2).
_UNKNOWN_LOSS = 0.6931471805599453


def is_offline(seq: Sequence) -> bool:
    """Whether it belongs to an offline request."""
    return seq.request.work_class is WorkClass.OFFLINE


def offline_waiting(view: View, *, first: bool) -> list[Sequence]:
    """Waiting offline requests that are considered: of each bucket of lengths, those that find most
    of their prompts in the cache; or only the one that came `first`."""
    if first:
        waits = view.waiting_in_order
        return waits[num_online(waits) :][:1]
    return [offered.seq for offered in view.kv.offline_pool.best_of_buckets(_MOST_BEGIN)]


def oldest_offline(view: View) -> Sequence:
    """The offline request that came first of those that run, else of those that wait. There is one.

    One that waits has no claim on the time of others while others of its class go on.
    """
    orders = (view.serving, view.waiting_in_order)
    return next(order[place] for order in orders if (place := num_online(order)) < len(order))


def offline_value(view: View, seq: Sequence, start: int, lost_blocks: float) -> float:
    """Echo's benefit less punishment, a second (equation 4), of the rest of a sequence from `start`
    on.

    The benefit is the tokens that come of it: one of a decode; of a prompt all of its own, those of
    a cached prefix included, and those of its answer, as far as its length is known. The punishment
    is the tokens of `lost_blocks`, which will be computed again.
    """
    latency, tokens = view.latency, len(seq.tokens)
    if seq.decoding:
        return 1.0 / latency.added_decode_s(tokens)
    work = PassWork()
    work.span(start, tokens - start, draws=1)
    seconds, answer = latency.added_s(work), 0.0
    if (length := seq.request.length) is not None:
        answer = length.quantile(0.5, seq.output_tokens) - seq.output_tokens
        seconds += answer * latency.added_decode_s(tokens + int(answer / 2))
    return (tokens + answer - lost_blocks * view.kv.block_size) / seconds


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
    def key(self) -> object:
        """What the item is: its step, or its score."""
        return self.step or next(iter(self.sequences))

    @property
    def sliced(self) -> StepWork | None:
        """The step, if some of its layers or its update may run now."""
        step = self.step
        return step if step and step.due and not (self.held and step.updatable) else None

    def batch_of(self, seq: Sequence) -> MicroBatchWork | None:
        """The micro-batch that records a sequence of the step."""
        record = seq.scoring.record if seq.scoring is not None else None
        return self.step.micro_batch_of(record) if self.step is not None and record else None

    def piece_s(self, latency: LatencyModel, block_size: int) -> float:
        """Seconds of the smallest piece of work."""
        return self._piece_s(latency, self.least_rows(latency, block_size))

    def least_rows(self, latency: LatencyModel, block_size: int) -> int:
        """Least rows of a piece of a forward, unless fewer are left: a KV block; of one that is
        recorded at most 64, and so many that beside answers they take as long as its fixed cost."""
        if self.step is None:
            return block_size
        one, two = PassWork(), PassWork()
        for rows, work in ((1, one), (2, two)):
            work.span(0, rows, scored=rows, recorded=rows)
        row_s = max(latency.forward_s(two) - latency.forward_s(one), 1e-9)
        return min(_MOST_LEAST, max(block_size, int(latency.added_s(one) / row_s) - 1))

    def _piece_s(self, latency: LatencyModel, rows: int) -> float:
        """Seconds of its first layer or update; of a sequence, up to so many rows."""
        owed = next(iter(self.step.owed()), None) if self.step is not None else None
        if owed is not None:
            return latency.slice_s(owed.backward, 1)
        seq = next(iter(self.sequences), None)
        if seq is None:
            return latency.update_s()
        alone, rows = PassWork(), min(rows, seq.remaining)
        alone.span(seq.computed, rows, scored=rows, recorded=rows)
        return latency.forward_s(alone)

    def whole_s(self, view: View, seconds: float) -> float:
        """Seconds of a pass of learning alone: `seconds`. While no online request runs, up to twice
        as long if the first sequence then fits whole, so that its graph is kept (`Ledger.whole`).
        """
        if num_online(view.serving):
            return seconds
        first_s = self._piece_s(view.latency, view.budgets.max_batch_tokens)
        return first_s if seconds < first_s <= 2 * seconds else seconds

    def value(self, latency: LatencyModel) -> float:
        """Trained tokens for each second that the step still takes; scored tokens of a score."""
        work, step = PassWork(), self.step
        for seq in self.sequences:
            work.span(seq.computed, seq.remaining, scored=seq.remaining, recorded=seq.remaining)
        seconds = latency.added_s(work) if work.rows else 0.0
        if step is None:
            return work.rows / seconds
        layers = [latency.slice_s(each.backward, each.layers_left) for each in step.recordings]
        return step.step.num_tokens / (seconds + sum(layers) + latency.update_s())


def learning_items(view: View, scored: list[Sequence], patience_s: float) -> list[LearningItem]:
    """Steps and scores by MACE's priority (4.1); `scored` are the scored sequences that run."""
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
