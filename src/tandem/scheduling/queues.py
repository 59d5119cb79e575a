"""Orders and selections that several policies share.

Reads the view, changes nothing. Invariant: every order is total, so equal views give equal
decisions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from tandem.core.decision import SliceCandidate
from tandem.core.sequence import Sequence, SequenceStatus
from tandem.core.slo import WorkClass
from tandem.estimators.latency import LatencyModel
from tandem.scheduling.ordered import class_then_arrival as class_then_arrival
from tandem.scheduling.training import StepWork
from tandem.scheduling.view import View

# Sorts before every offline sequence in the order of class and arrival.
_OFFLINE = (1, float("-inf"), 0)


def first_waiting(view: View, count: int) -> list[Sequence]:
    """The first `count` waiting sequences of requests, by class and arrival."""
    return view.waiting_in_order[:count]


def num_online(in_order: list[Sequence]) -> int:
    """Number of online sequences in a list by class and arrival: where the offline ones begin."""
    return bisect_left(in_order, _OFFLINE, key=class_then_arrival)


def is_waiting(seq: Sequence) -> bool:
    """Whether it does not run: it has not started or was preempted."""
    return seq.status is SequenceStatus.WAITING


def is_prompt(seq: Sequence) -> bool:
    """Whether it is an online sequence without its first token."""
    return seq.request.work_class is WorkClass.ONLINE and len(seq.tokens) == seq.prompt_tokens


def is_lone_score(seq: Sequence) -> bool:
    """Whether it is a score requested on its own, not a sequence of a training step."""
    return seq.scoring is not None and seq.scoring.step_id is None


def startable_scores(view: View) -> Iterator[Sequence]:
    """Waiting scores, oldest first, except those whose trainer is about to be updated."""
    waiting = [seq for seq in view.scores if is_waiting(seq)]
    changing = {step.trainer for step in view.steps if step.updatable} if waiting else set()
    return (seq for seq in waiting if seq.scoring and seq.scoring.trainer not in changing)


def slices_within(
    steps: Iterable[StepWork], latency: LatencyModel, seconds: float, at_least_one: bool
) -> tuple[list[SliceCandidate], float]:
    """Backward slices and updates of `steps`, in order, that fit into `seconds`; and the seconds
    left.

    With `at_least_one`, the first layer (or update) is granted however long it takes.
    """
    granted: list[SliceCandidate] = []
    for step in steps:
        layers = 0
        for batch in step.owed():
            fitting = min(batch.layers_left, latency.layers_within(batch.backward, seconds))
            if fitting == 0 and at_least_one and not granted and not layers:
                fitting = 1
            layers += fitting
            seconds -= latency.slice_s(batch.backward, fitting)
            if fitting < batch.layers_left:
                break
        updatable = step.updatable
        update_s = latency.update_s() if updatable else 0.0
        due = updatable and (update_s <= seconds or (at_least_one and not granted))
        if layers or due:
            granted.append(SliceCandidate(step.step_id, layers))
            seconds -= update_s
    return granted, seconds
