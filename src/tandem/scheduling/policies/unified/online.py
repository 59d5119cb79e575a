"""The online requests of an iteration: their order, their pass, and when its first token is due.

Predicts what admission will grant, nearly; changes nothing. Invariant: the time budget is never
less than what the requests themselves are predicted to take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.estimators.work import PassWork
from tandem.scheduling.policies.unified.deadlines import Deadlines
from tandem.scheduling.policies.unified.load import OVERLOAD
from tandem.scheduling.queues import first_waiting, is_prompt
from tandem.scheduling.view import View

# Prompts are batched without further conditions while the pass takes at most this share of the TTFT
# objective of each prompt that ends in it.
_LONG = 0.3
# No prompt is deferred for an answer whose TPOT leaves prompts less than this share of the time:
# prompts would come far slower than they could.
_LEAST_SHARE = 1 / 6
# Costs that equal the savings up to rounding count as worth it.
_TIE = 1.0 + 1e-6


@dataclass(slots=True)
class OnlinePass:
    """The pass of the online requests that take part in an iteration."""

    joining: list[Sequence] = field(default_factory=list)  # waiting requests that are batched
    deferred: list[Sequence] = field(default_factory=list)  # the other waiting requests
    served: int = 0  # running requests that take part
    running_rows: int = 0
    left: int = 0  # rows that nobody took
    work: PassWork = field(default_factory=PassWork)
    seconds: float = 0.0  # predicted
    protects: bool = False  # whether a prompt is deferred so that no answer becomes late

    @property
    def rows(self) -> int:
        """Rows of the pass."""
        return self.work.tokens


def starting_order(view: View, count: int, *, owed: bool) -> list[Sequence]:
    """The first `count` waiting sequences, in the order in which they should start.

    Once a request is too late for its TTFT objective, those that can be in time go first, by the
    latest start that is in time. With `owed`, the one that is late for the longest time goes before
    them. Preempted answers come first, since their clients are already reading.
    """
    first, starts, now = first_waiting(view, count), view.starts, view.now
    if not starts.any_late(now):
        return first
    late, in_time = starts.late(now, count), starts.in_time(now, count)
    ordered = [*starts.begun(), *late[: int(owed)], *in_time, *late[int(owed) :]]
    listed = {seq.seq_id for seq in ordered}
    return [*ordered, *[seq for seq in first if seq.seq_id not in listed]][:count]


def online_pass(
    view: View, running: list[Sequence], queue: list[Sequence], busy: float, owed: Sequence | None
) -> OnlinePass:
    """The pass of the running requests and of the first of the queue that are worth their place.

    All first tokens of a pass come at its end. One more prompt delays the prompts before it by the
    time that it adds. It saves itself and all behind it the constant cost of a separate pass; if
    only a part of it fits, that part of the cost. Once the pass is long for the objective of a
    prompt before it, a prompt is batched only if it saves more than it costs. Lost time also delays
    future requests: each waiting request counts 1 / (1 - busy)^2, the growth of a queue's wait with
    the load. Preempted answers and requests without an objective are batched while there are rows.

    Under overload, a prompt is also deferred if it would make an answer late that is on time, with
    all of its rows: else all answers would be late together. The request `owed` is never deferred.
    """
    found = OnlinePass()
    most, latency = view.budgets.max_batch_tokens, view.latency
    left, most_s, ending = _add_running(view, running, found)
    found.running_rows = most - left
    found.seconds = latency.forward_s(found.work)
    spare_s = _spare_s(view, running) if queue and busy >= OVERLOAD else math.inf
    for place, seq in enumerate(queue):
        if left <= 0:
            break
        start = _start(view, seq)
        needed = len(seq.tokens) - start
        taken = min(needed, left)
        joined = found.work.copy()
        joined.span(start, taken, draws=int(taken == needed))
        joined_s = latency.forward_s(joined)
        if is_prompt(seq) and seq is not owed:
            rest_s = _span_s(view, start + taken, needed - taken) if taken < needed else 0.0
            if joined_s + rest_s > spare_s:
                found.protects = True
                break
            added_s = joined_s - found.seconds
            saved_s = (_span_s(view, start, taken) - added_s) * taken / needed
            costs_s = (1.0 - busy) ** 2 * ending * added_s
            if joined_s > most_s and costs_s > _TIE * (len(queue) - place) * saved_s:
                break
        found.joining.append(seq)
        found.work, found.seconds = joined, joined_s
        left -= taken
        if taken == needed:
            ending += 1
            most_s = min(most_s, _most_s(view, seq))
    found.left, found.deferred = left, queue[len(found.joining) :]
    return found


def prompt_s(view: View, seq: Sequence) -> float:
    """Seconds of a pass with a waiting sequence alone."""
    return _span_s(view, _start(view, seq), len(seq.tokens) - _start(view, seq))


def due_s(view: View, deadlines: Deadlines, running: list[Sequence], online: OnlinePass) -> float:
    """Seconds until the first token of the pass is due, at least what the pass takes.

    Deferred prompts need time for their own pass before they are due. A prompt that is deferred to
    protect answers waits for this time, so nothing else gets it.
    """
    if online.protects:
        return online.seconds
    least_s = deadlines.slack_s(view, [*running[: online.served], *online.joining])
    work, left = PassWork(), view.budgets.max_batch_tokens if online.left > 0 else 0
    for seq in online.deferred:
        if left <= 0:
            break
        start = _start(view, seq)
        rows = min(len(seq.tokens) - start, left)
        work.span(start, rows, draws=1)
        least_s = min(least_s, deadlines.slack_s(view, [seq]) - view.latency.forward_s(work))
        left -= rows
    return max(least_s, online.seconds)


def _spare_s(view: View, running: list[Sequence]) -> float:
    """Longest pass, in seconds, after which every answer that is on time still is: Echo's smallest
    slack (5.1), applied to prompts too.

    Token i after the first is on time until i * TPOT after it. Ignored are answers whose first
    token was late, whose next token is late already, or whose decodes leave prompts no time.
    """
    decodes = PassWork()
    decodes.decode_all([len(seq.tokens) for seq in running if seq.first_token_s is not None])
    least_s = view.latency.forward_s(decodes) / (1.0 - _LEAST_SHARE)
    spare_s = math.inf
    for seq in running:
        first_s, request = seq.first_token_s, seq.request
        if first_s is None or request.work_class is not WorkClass.ONLINE:
            continue
        slo = request.slo or view.default_slo
        left_s = first_s + (len(seq.tokens) - seq.prompt_tokens) * slo.tpot_s - view.now
        late = left_s < 0.0 or first_s - request.arrival_s > slo.ttft_s
        if not late and slo.tpot_s >= least_s:
            spare_s = min(spare_s, left_s)
    return spare_s


def _start(view: View, seq: Sequence) -> int:
    """The first position of a waiting sequence that is not cached."""
    return seq.computed or min(view.match(seq), len(seq.tokens) - 1)


def _most_s(view: View, seq: Sequence) -> float:
    """How long the pass in which `seq` ends may get without further conditions."""
    request = seq.request
    if request.work_class is not WorkClass.ONLINE:
        return math.inf
    return _LONG * (request.slo or view.default_slo).ttft_s


def _span_s(view: View, start: int, rows: int) -> float:
    alone = PassWork()
    alone.span(start, rows)
    return view.latency.forward_s(alone)


def _add_running(
    view: View, sequences: list[Sequence], found: OnlinePass
) -> tuple[int, float, int]:
    """Add the running requests for which there are rows. Returns the rows left, how long the pass
    may be for the prompts that end, and how many end."""
    contexts: list[int] = []
    left, most_s, ending = view.budgets.max_batch_tokens, math.inf, 0
    for seq in sequences:
        if left <= 0:
            break
        found.served += 1
        length, computed = len(seq.tokens), seq.computed
        if length - computed == 1 and computed:
            contexts.append(length)
            left -= 1
            continue
        taken = min(length - computed, left)
        left -= taken
        ends = taken == length - computed
        if ends:
            ending += 1
            most_s = min(most_s, _most_s(view, seq))
        found.work.span(computed, taken, draws=int(ends))
    found.work.decode_all(contexts)
    return left, most_s, ending
