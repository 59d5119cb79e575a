"""The online requests of an iteration: their order, their pass, and when its first token is due.

Predicts what admission will grant, nearly; changes nothing. Invariant: a period in which no request
waits gives the same busy share whether it is noted once or in parts, so a simulator may leap over
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.estimators.work import PassWork
from tandem.scheduling.policies.unified.deadlines import Deadlines
from tandem.scheduling.policies.unified.memory import PeakMemory
from tandem.scheduling.queues import first_waiting, is_prompt
from tandem.scheduling.view import View

# Time constant of the busy share, in seconds: it follows the present burst, not the hour.
_LATELY_S = 3.0
# From this busy share on there is overload: not every request may be served in time.
_OVERLOAD = 0.5
# Prompts are batched without further conditions while the pass takes at most this share of the TTFT
# objective of each prompt that ends in it.
_LONG = 0.3
# No prompt is deferred for an answer whose TPOT leaves prompts less than this share of the time:
# prompts would come far slower than they could.
_LEAST_SHARE = 1 / 6


class Load:
    """`busy` is the share of recent time spent in iterations that were decided while an online
    request waited; the latest seconds count most. It is the utilisation of the prompts' queue.
    Decodes while no request waits do not count, since prompts can join them."""

    def __init__(self) -> None:
        self._busy = 0.0  # at `_at_s`; no request has waited since
        self._at_s = self._noted_s = 0.0
        self._waited = False
        self._step: int | None = None  # the iteration that had ended

    @property
    def busy(self) -> float:
        """The share at the time of the last `note`."""
        return self._busy * math.exp((self._at_s - self._noted_s) / _LATELY_S)

    def note(self, view: View) -> None:
        """Called once per decision, before it is made."""
        now, first = view.now, view.waiting_in_order[:1]
        waits = bool(first) and first[0].request.work_class is WorkClass.ONLINE
        if self._waited:
            passed_s = now - self._noted_s
            busy_s = passed_s if waits else 0.0
            if view.trailing_s:  # the device did not idle
                busy_s = passed_s
            elif last_step(view) != self._step:  # it may have idled after the iteration
                busy_s = min(passed_s, max([each.elapsed_s for each in view.last_results] or [0.0]))
            busy = 1.0 - (1.0 - self.busy) * math.exp(-busy_s / _LATELY_S)
            self._busy = busy * math.exp((busy_s - passed_s) / _LATELY_S)
            self._at_s = now
        self._noted_s, self._waited, self._step = now, waits, last_step(view)


def last_step(view: View) -> int | None:
    """Number of the iteration that ended last. A number instead of its plan: freeing the spans of a
    kept plan would slow the next decision."""
    return None if view.last_plan is None else view.last_plan.step


def starting_order(view: View, count: int, *, owed: bool) -> list[Sequence]:
    """The first `count` waiting sequences, in the order in which they should start.

    Once a request is too late for its TTFT objective, those that can be in time go first, by the
    latest start that is in time. Late ones follow by slack over expected length, so that a short
    answer does not wait long behind long ones. With `owed`, the one that is late for the longest
    time goes before all of them. Preempted answers come first, since their clients are already
    reading.
    """
    first, starts, now = first_waiting(view, count), view.starts, view.now
    if not starts.any_late(now):
        return first
    ordered = [*starts.begun(), *starts.late(now, int(owed)), *starts.in_time(now, count)]
    if len(ordered) < count:
        ordered += [*starts.late_by_length(now), *starts.late(now, count), *first]
    return list(dict.fromkeys(ordered))[:count]


def start_of(view: View, seq: Sequence) -> int:
    """The first position of a sequence that has to be computed."""
    return seq.computed or min(view.kv.match(seq), len(seq.tokens) - 1)


def span_s(view: View, start: int, rows: int) -> float:
    """Seconds of a pass with these rows alone."""
    alone = PassWork()
    alone.span(start, rows)
    return view.latency.forward_s(alone)


@dataclass(slots=True)
class OnlinePass:
    """The pass of the online requests that take part in an iteration."""

    left: int = 0  # rows that they do not take
    running: list[Sequence] = field(default_factory=list)  # running requests that take part
    joining: list[Sequence] = field(default_factory=list)  # waiting requests that are batched
    joining_rows: int = 0
    deferred: list[Sequence] = field(default_factory=list)  # the other waiting requests
    protects: bool = False  # whether one is deferred so that no answer becomes late
    work: PassWork = field(default_factory=PassWork)
    seconds: float = 0.0  # predicted
    ending: int = 0  # prompts that end in it
    most_s: float = math.inf  # how long it may be for these, without further conditions

    @staticmethod
    def of(
        view: View,
        running: list[Sequence],
        queue: list[Sequence],
        busy: float,
        owed: Sequence | None = None,
        memory: PeakMemory | None = None,
    ) -> OnlinePass:
        """The running requests, and the first of the queue that are worth their place.

        All first tokens of a pass come at its end. One more prompt delays the prompts before it by
        the time that it adds. It saves itself and all behind it the constant cost of a separate
        pass; if only a part of it fits, that part of the cost. Once the pass is long for the
        objective of a prompt before it, a prompt is batched only if it saves more than it costs.
        Lost time also delays future requests: each waiting request counts 1 / (1 - busy)^2, the
        growth of a queue's wait with the load. Preempted answers and requests without an objective
        are batched while there are rows.

        Under overload, a prompt is also deferred if it would make an answer late that is on time,
        with all of its rows: else all answers would be late together. The request `owed` is never
        deferred. None starts that does not fit into `memory`, and none behind it.
        """
        found = OnlinePass(view.budgets.max_batch_tokens)
        found._add_running(view, running)
        spare_s = _spare_s(view, running) if queue and busy >= _OVERLOAD else math.inf
        for place, seq in enumerate(queue):
            if found.left <= 0:
                break
            start = start_of(view, seq)
            needed = len(seq.tokens) - start
            taken = min(needed, found.left)
            work = found.work.copy()
            work.span(start, taken, draws=int(taken == needed))
            seconds = view.latency.forward_s(work)
            if is_prompt(seq) and seq is not owed:
                rest_s = span_s(view, start + taken, needed - taken) if taken < needed else 0.0
                if seconds + rest_s > spare_s:
                    found.protects = True
                    break
                added_s = seconds - found.seconds
                saved_s = (span_s(view, start, taken) - added_s) * taken / needed
                cost_s = (1.0 - busy) ** 2 * found.ending * added_s
                # Equal but for rounding: batched.
                if seconds > found.most_s and cost_s > 1.000001 * (len(queue) - place) * saved_s:
                    break
            if memory is not None and not memory.try_count(seq):
                return found  # those that are left have no time to wait for
            found.joining.append(seq)
            found.joining_rows += taken
            found._take(view, seq, taken, ends=taken == needed)
            found.work, found.seconds = work, seconds
        found.deferred = queue[len(found.joining) :]
        return found

    def due_s(self, view: View, deadlines: Deadlines) -> float:
        """Seconds until its first token is due, at least what it takes.

        Deferred prompts need time for a pass of their own before they are due. A prompt that is
        deferred to protect answers waits for this time, so nothing else gets it.
        """
        if self.protects:
            return self.seconds
        least_s = deadlines.slack_s(view, [*self.running, *self.joining])
        work, left = PassWork(), view.budgets.max_batch_tokens if self.left > 0 else 0
        for seq in self.deferred:
            start = start_of(view, seq)
            rows = min(len(seq.tokens) - start, left)
            if rows <= 0:
                break
            work.span(start, rows, draws=1)
            least_s = min(least_s, deadlines.slack_s(view, [seq]) - view.latency.forward_s(work))
            left -= rows
        return max(least_s, self.seconds)

    def _add_running(self, view: View, sequences: list[Sequence]) -> None:
        contexts: list[int] = []
        for seq in sequences:
            if self.left <= 0:
                break
            self.running.append(seq)
            length, computed = len(seq.tokens), seq.computed
            if length - computed == 1 and computed:
                contexts.append(length)
                self.left -= 1
                continue
            taken = min(length - computed, self.left)
            ends = taken == length - computed
            self._take(view, seq, taken, ends=ends)
            self.work.span(computed, taken, draws=int(ends))
        self.work.decode_all(contexts)
        self.seconds = view.latency.forward_s(self.work)

    def _take(self, view: View, seq: Sequence, rows: int, *, ends: bool) -> None:
        self.left -= rows
        self.ending += ends
        if ends and seq.request.work_class is WorkClass.ONLINE:
            self.most_s = min(self.most_s, _LONG * view.slo(seq).ttft_s)


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
        slo = view.slo(seq)
        left_s = first_s + seq.output_tokens * slo.tpot_s - view.now
        late = left_s < 0.0 or first_s - request.arrival_s > slo.ttft_s
        if not late and slo.tpot_s >= least_s:
            spare_s = min(spare_s, left_s)
    return spare_s
