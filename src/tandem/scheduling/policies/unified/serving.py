"""The requests of an iteration: their rows, their time, and when the first token is due.

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
from tandem.scheduling.policies.unified.load import RUSH
from tandem.scheduling.queues import is_prompt
from tandem.scheduling.view import View

# Prompts are batched without further conditions while the pass takes at most this share of the TTFT
# objective of each prompt that ends in it.
_LONG = 0.3
# Under overload one prompt starts per this many TTFT objectives (its own or the default, if that is
# shorter), whatever that does to answers.
_LONGEST_HOLD = 4.0
# No prompt is deferred for an answer whose TPOT leaves prompts less than this share of the time:
# prompts would come far slower than they could.
_LEAST_ROOM = 1 / 6
# Costs that equal the savings up to rounding count as worth it.
_TIE = 1.0 + 1e-6


@dataclass(slots=True)
class Serving:
    """The requests of one pass."""

    queue: list[Sequence] = field(default_factory=list)  # waiting requests
    # those of the queue that are batched in this iteration
    joining: list[Sequence] = field(default_factory=list)
    running_rows: int = 0  # rows of running requests
    work: PassWork = field(default_factory=PassWork)  # the pass of all requests that take part
    predicted_s: float = 0.0  # seconds of that pass
    held: bool = False  # whether a prompt is deferred to protect answers
    due_s: float = 0.0  # seconds until the first token is due

    @property
    def rows(self) -> int:
        """Rows of the pass, including those of running requests."""
        return self.work.tokens


def foresee(
    view: View,
    deadlines: Deadlines,
    running: list[Sequence],
    queue: list[Sequence],
    busy: float,
    began_s: float = -math.inf,
) -> Serving:
    """Rows and time of the requests, nearly as admission will grant them, and the time budget.

    Saved slack is spent in passes of up to the ceiling, since few long passes cost less than many
    short ones. Deferred prompts need time for their own pass before they are due. `busy` and
    `began_s` are explained in `joins`.
    """
    deadlines.forget_ended(view)
    found = Serving(queue)
    served, left = _fill(view, running, found, busy, began_s)
    due_s = deadlines.slack_s(view, running[:served] + found.joining)
    if left > 0:
        due_s = min(due_s, _held_s(view, deadlines, queue[len(found.joining) :]))
    if found.held:  # the deferred prompt waits for this time, so nothing else gets it
        due_s = 0.0
    found.due_s = max(due_s, found.predicted_s)
    return found


def joins(
    view: View,
    running: list[Sequence],
    queue: list[Sequence],
    busy: float,
    began_s: float = -math.inf,
) -> list[Sequence]:
    """The first of the waiting requests that are worth their place in the next pass.

    All first tokens of a pass come at its end. One more prompt delays the prompts before it by the
    time that it adds. It saves itself and all behind it the constant cost of a separate pass; if
    only a part of it fits, that part of the cost. Once the pass is long for the objective of a
    prompt before it, a prompt is batched only if it saves more than it costs, summed over the
    requests that wait. Lost time also delays future requests. So each waiting request counts 1 / (1
    - busy)^2, where `busy` is the share of the time that is taken (`Load`): the wait in a queue,
    busy / (1 - busy), grows at this rate with the load. Preempted answers and requests without an
    objective are batched while there are rows.

    Under overload, a prompt is also deferred if it would make an answer late that is on time.
    `_Answers` has the rule; the last prompt started at `began_s`. A prompt that does not fit into
    the pass counts with all of its rows.
    """
    if not queue:
        return queue
    found = Serving(queue)
    _fill(view, running, found, busy, began_s)
    return found.joining


def _fill(
    view: View, running: list[Sequence], found: Serving, busy: float, began_s: float
) -> tuple[int, int]:
    """The pass of the running requests and of the requests of the queue that are batched. Returns
    how many running requests take part, and how many rows are left. If any are left, the other
    requests of the queue are deferred."""
    most, latency, queue = view.budgets.max_batch_tokens, view.latency, found.queue
    served, left, ends = _add_running(running, most, found.work)
    ending = len(ends)
    most_s = min([_most_s(view, seq) for seq in ends], default=math.inf)
    found.running_rows = most - left
    found.predicted_s = latency.forward_s(found.work)
    answers = _Answers()
    if queue and busy >= RUSH:
        answers = _Answers.of(view, running, began_s)
    for place, seq in enumerate(queue):
        if left <= 0:
            break
        start = _start(view, seq)
        needed = len(seq.tokens) - start
        taken = min(needed, left)
        joined = found.work.copy()
        joined.span(start, taken, draws=int(taken == needed))
        joined_s = latency.forward_s(joined)
        prompt = is_prompt(seq)
        if prompt and answers.spare_s < math.inf:
            rest = needed - taken
            rest_s = _span_s(view, start + taken, rest) if rest else 0.0
            if not answers.start(view, seq, joined_s + rest_s):
                found.held = True
                break
        if prompt and joined_s > most_s:
            added_s = joined_s - found.predicted_s
            saved_s = (_span_s(view, start, taken) - added_s) * taken / needed
            costs_s = (1.0 - busy) ** 2 * ending * added_s
            if costs_s > _TIE * (len(queue) - place) * saved_s:
                break
        found.joining.append(seq)
        found.work, found.predicted_s = joined, joined_s
        left -= taken
        if taken == needed:
            ending += 1
            most_s = min(most_s, _most_s(view, seq))
    return served, left


@dataclass(slots=True)
class _Answers:
    """The running answers for which prompts are deferred under overload. If all prompts started,
    every request would be late.

    Token i after the first is on time until i * TPOT after it. Ignored are answers whose first
    token was late, whose next token is late already, or whose decodes leave prompts no time.
    """

    # Longest pass, in seconds, after which every answer that is on time still is: Echo's smallest
    # slack (5.1), applied to prompts too.
    spare_s: float = math.inf
    began_s: float = -math.inf  # when a prompt last started

    @staticmethod
    def of(view: View, running: list[Sequence], began_s: float) -> _Answers:
        """The answers among the `running` requests."""
        decodes = PassWork()
        decodes.decode_all([len(seq.tokens) for seq in running if seq.first_token_s is not None])
        least_s = view.latency.forward_s(decodes) / (1.0 - _LEAST_ROOM)
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
        return _Answers(spare_s, began_s)

    def start(self, view: View, seq: Sequence, seconds: float) -> bool:
        """Start a prompt whose pass takes `seconds`, unless it is deferred; returns whether it
        starts. It is not deferred once none has started for several TTFT objectives."""
        ttft_s = min((seq.request.slo or view.default_slo).ttft_s, view.default_slo.ttft_s)
        if seconds > self.spare_s and view.now - self.began_s < _LONGEST_HOLD * ttft_s:
            return False
        self.began_s = view.now
        return True


def _most_s(view: View, seq: Sequence) -> float:
    """How long the pass in which `seq` ends may get without further conditions."""
    request = seq.request
    if request.work_class is not WorkClass.ONLINE:
        return math.inf
    return _LONG * (request.slo or view.default_slo).ttft_s


def _held_s(view: View, deadlines: Deadlines, held: list[Sequence]) -> float:
    """Seconds until a pass of the deferred requests has to begin. It has at most a batch's rows of
    them, as if they shared it."""
    work, due_s, left = PassWork(), math.inf, view.budgets.max_batch_tokens
    for seq in held:
        if left <= 0:
            break
        start = _start(view, seq)
        rows = min(len(seq.tokens) - start, left)
        work.span(start, rows, draws=1)
        due_s = min(due_s, deadlines.slack_s(view, [seq]) - view.latency.forward_s(work))
        left -= rows
    return due_s


def _start(view: View, seq: Sequence) -> int:
    """The first position of a waiting sequence that is not cached."""
    return seq.computed or min(view.match(seq), len(seq.tokens) - 1)


def _span_s(view: View, start: int, rows: int) -> float:
    alone = PassWork()
    alone.span(start, rows)
    return view.latency.forward_s(alone)


def _add_running(
    sequences: list[Sequence], left: int, work: PassWork
) -> tuple[int, int, list[Sequence]]:
    """Add at most `left` rows of running requests to `work`. Returns how many requests take part,
    the rows left, and the sequences whose prompts end."""
    contexts: list[int] = []
    ending: list[Sequence] = []
    served = 0
    for seq in sequences:
        if left <= 0:
            break
        served += 1
        length, computed = len(seq.tokens), seq.computed
        taken = length - computed
        if taken == 1 and computed:
            contexts.append(length)
            left -= 1
            continue
        if taken > left:
            taken = left
        left -= taken
        ends = taken == length - computed
        if ends:
            ending.append(seq)
        work.span(computed, taken, draws=int(ends))
    work.decode_all(contexts)
    return served, left, ending
