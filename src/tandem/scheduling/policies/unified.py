"""Serve everything online first, then learn in what is left of the iteration's rows and time.

Training forwards fill the pass that decodes need anyway (fused), backward slices the time until the
most urgent answer is due; learning alone ends between two layers when a request comes. MACE's
priority (section 4.1) orders the steps, and lets one that has waited long go before prompts; a
share of the time is learning's however many requests there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.decision import Candidate, Decision, SliceCandidate
from tandem.core.sequence import Sequence
from tandem.scheduling.deadlines import Deadlines
from tandem.scheduling.giving_way import GivingWay
from tandem.scheduling.queues import is_lone_score, slices_within
from tandem.scheduling.room import LearningItem, Room
from tandem.scheduling.serving import Serving, foresee
from tandem.scheduling.turns import Turns
from tandem.scheduling.view import Policy, View

# A pass beside requests records when it may take this share of the ceiling: each pass that records
# streams the head again, so slack is saved up for few large ones.
_FULL_SHARE = 0.9
# Of the time that a request which comes next may wait, an iteration takes at most so much.
_WAIT_SHARE = 0.25
# Of the slack of running answers, learning that gives way takes at most so much at once: this while
# requests get their first token at once, the other where those are late. What is kept lets answers
# end early, and fewer run when the next ones come.
_MOST_SHARE = 0.5
_LEAST_SHARE = 0.05
# A pass that gives way is preferred to one beside requests that could take less than half as long.
_MUCH_LONGER = 2.0
# Where a whole ceiling is free and yet nothing seems to fit, the smallest piece of it is tried
# once in so many seconds: a prediction that is far too long is never corrected otherwise.
_PROBE_S = 0.5
# Of the time, learning has at least this much until what it costs is known.
_TRIAL_SHARE = 0.05
# What a score counts as urgent: a sample whose loss is unknown (log 2).
_UNKNOWN_LOSS = 0.6931471805599453
# Of the slack, at most so much more than is used is kept for wrong predictions: a deadline that is
# missed moves, but time that is not used is gone.
_MOST_MARGIN = 0.2
# MACE's priorities: prompts begin one above learning and age at a quarter of its rate.
_PROMPT_PRIORITY = 1.0
_PROMPT_AGEING = 0.25


@dataclass(frozen=True, slots=True)
class Options:
    """Dials of the policy.

    `ceiling_s` bounds an iteration's predicted time beside requests (one that arrives waits for its
    end), and so does a quarter of what requests of late could have waited without missing their
    TTFT objective; `idle_s` that of learning alone, which gives way. `min_share` of the time is
    learning's under any load, and more until it is known what learning costs. `patience_s` is after
    how long a step of no urgency goes before prompts (one over MACE's delta_ft); `gamma` weighs
    urgency. `temporal_only` keeps learning out of passes with requests (for comparison).
    `late_share` of the starts are of requests that are too late for their TTFT objective, while
    others are not (1: first come, first served).
    """

    ceiling_s: float = 0.25
    idle_s: float = 0.5
    min_share: float = 0.002
    patience_s: float = 30.0
    gamma: float = 0.3
    temporal_only: bool = False
    late_share: float = 0.25

    def __post_init__(self) -> None:
        if min(self.ceiling_s, self.idle_s, self.patience_s) <= 0.0:
            raise ValueError("ceiling_s, idle_s and patience_s must be above 0")
        if not 0.0 < self.min_share <= 1.0:
            raise ValueError("min_share is a share: above 0, at most 1")
        if not 0.0 < self.late_share <= 1.0:
            raise ValueError("late_share is a share: above 0, at most 1")


def create(options: Options = Options()) -> Policy:
    """The policy of this file."""
    return Unified(options)


@dataclass(frozen=True, slots=True)
class _Budget:
    """Seconds of an iteration: the most that it may take; for learning beside the requests, and how
    long a pass of which only a part of a forward fits must be; for slices and for a pass alone,
    while nobody waits and every next token can, and whether that pass is worth more than one beside
    them. With `owed`, learning uses what it has earned."""

    ceiling_s: float
    beside_s: float
    full_s: float
    alone_s: float
    pass_s: float
    longer: bool
    owed: bool


@dataclass(slots=True)
class _Learning:
    """Forwards before and after the waiting requests, slices, and who is not preempted; what of it
    was earned, and how long the pass was predicted to be."""

    first: list[Candidate] = field(default_factory=list)
    last: list[Candidate] = field(default_factory=list)
    slices: list[SliceCandidate] = field(default_factory=list)
    protected: set[int] = field(default_factory=set)
    spent_s: float = 0.0
    pass_s: float = 0.0

    @property
    def empty(self) -> bool:
        """Whether nothing was found to fit."""
        return not (self.first or self.last or self.slices)


class Unified:
    """See the module. Remembers how much time learning has earned but not used, which deadlines
    have moved, and whose turn it is."""

    decodes_alike = True
    records_in_parts = True

    def __init__(self, options: Options) -> None:
        self._options = options
        self._deadlines = Deadlines()
        self._turns = Turns(options.late_share)
        self._earned_s = 0.0
        self._decided_s: float | None = None
        self._probed_s = float("-inf")
        self._giving_way = GivingWay(options.idle_s)
        self._served = False
        self._served_s = float("-inf")  # when the last pass with requests ended, at the latest

    def decide(self, view: View) -> Decision:
        """See the module."""
        served, self._served = self._served, True
        if served:
            self._served_s = view.now
        self._earned_s += self._giving_way.judge(view)
        running = view.running_in_order
        if not (view.learning or view.steps or (running and running[-1].scoring is not None)):
            return self._serve_only(view, running)
        serving = view.serving
        queue = self._turns.queue(view, max(0, view.budgets.max_sequences - len(serving)) + 1)
        items = self._items(view, running[len(serving) :], queue)
        if not items:
            return self._serve_only(view, running)
        requests = foresee(view, self._deadlines, serving, queue)
        self._earn(view, items[0], requests)
        budget = self._budget(view, items[0], requests)
        if self._options.temporal_only and requests.rows:
            alone, beside = _Learning(), _Learning()
            if served:  # else it is the requests' turn
                alone = self._instead(view, items, budget.beside_s, needed=False)
            if served and alone.empty and self._probes(view, budget):
                alone = self._instead(view, items, budget.beside_s, needed=True)
        else:
            alone, beside = self._alone_or_beside(view, items, requests, budget)
        if alone.empty:
            return _decision(running, _all(serving), _all(queue), beside)
        self._served, gives_way = False, not (budget.owed and self._options.temporal_only)
        if gives_way:
            self._giving_way.give(view, alone.pass_s, alone.spent_s)
        return _decision(running, [], [], alone, gives_way=gives_way)

    def _alone_or_beside(
        self, view: View, items: list[LearningItem], requests: Serving, budget: _Budget
    ) -> tuple[_Learning, _Learning]:
        """What learning does in a pass without the requests, if anything, or else beside them."""
        alone, beside = self._slices(view, items, budget.alone_s), _Learning()
        if not alone.empty:
            return alone, beside
        # What it has earned, learning gets beside the requests; without any, after a lost pass.
        idle = not requests.rows
        owed = budget.owed and (not idle or self._giving_way.lost)
        first = not owed and (idle or budget.longer)
        if first:
            alone = self._instead(view, items, budget.pass_s, needed=idle)
        if alone.empty:
            beside = self._learn(view, items, requests, budget.beside_s, budget.full_s, needed=idle)
        if alone.empty and beside.empty:
            # What is too long beside requests goes before them.
            needed = self._probes(view, budget)
            if needed or not first:
                alone = self._instead(view, items, budget.pass_s, needed=needed)
        return alone, beside

    def _instead(
        self, view: View, items: list[LearningItem], seconds: float, *, needed: bool
    ) -> _Learning:
        """What of `items` fits into a pass without the requests."""
        if seconds <= 0.0 and not needed:
            return _Learning()
        return self._learn(view, items, Serving(), seconds, needed=needed)

    def _probes(self, view: View, budget: _Budget) -> bool:
        """Whether it is time to try the smallest piece although it seems not to fit."""
        free = budget.alone_s >= budget.ceiling_s and self._served_s == view.now
        if not free or view.now - self._probed_s < _PROBE_S:
            return False
        self._probed_s = view.now
        return True

    def _budget(self, view: View, first: LearningItem, requests: Serving) -> _Budget:
        """See `_Budget`."""
        ceiling_s = self._ceiling_s(view, beside=requests.rows > 0)
        full_s = _FULL_SHARE * ceiling_s if requests.rows else 0.0
        if requests.rows:  # a pass without them comes out of the same pause
            ceiling_s = min(ceiling_s, self._options.ceiling_s - (view.now - self._served_s))
        # What predictions are usually off by is not given away: an objective that is aimed at
        # exactly is missed every other time.
        due_s = requests.due_s / (1.0 + min(_MOST_MARGIN, view.latency.uncertainty))
        beside_s = min(due_s, ceiling_s) - requests.predicted_s
        # While prompts wait, what is earned does too, until nothing more can be.
        least_s = first.least_s(view.latency)
        owed_s = self._most_earned_s(view, least_s) if requests.queue else least_s
        owed = self._earned_s >= owed_s
        if owed:
            beside_s, full_s = max(beside_s, self._earned_s), 0.0
        alone_s = 0.0
        if not requests.rows:
            alone_s = self._options.idle_s
        elif not requests.queue:
            pause_s = self._options.ceiling_s - (view.now - self._served_s)
            share = max(_LEAST_SHARE, _MOST_SHARE * self._deadlines.ease)
            alone_s = min(share * (due_s - requests.predicted_s), pause_s)
        pass_s = min(alone_s, max(self._giving_way.pass_s, least_s))
        if pass_s < least_s:
            pass_s = 0.0
        longer = self._giving_way.pass_s >= least_s and pass_s > _MUCH_LONGER * beside_s
        return _Budget(ceiling_s, beside_s, full_s, alone_s, pass_s, longer, owed)

    def _ceiling_s(self, view: View, *, beside: bool) -> float:
        """The longest iteration: a request that arrives waits for its end."""
        most_s = self._options.ceiling_s if beside else self._options.idle_s
        return min(most_s, _WAIT_SHARE * self._deadlines.wait_s(view))

    def _serve_only(self, view: View, running: list[Sequence]) -> Decision:
        """Requests alone: the usual case, and the one that must cost least."""
        self._earned_s, self._decided_s = 0.0, None
        serving = view.serving
        queue = self._turns.queue(view, max(0, view.budgets.max_sequences - len(serving)) + 1)
        return _decision(running, _all(serving), _all(queue), _Learning())

    def _items(
        self, view: View, scored: list[Sequence], queue: list[Sequence]
    ) -> list[LearningItem]:
        """Learning work by MACE's priority; overdue is what has passed the oldest prompt."""
        ageing, gamma = 1.0 / self._options.patience_s, self._options.gamma

        def priority(arrival_s: float, urgency: float) -> float:
            return (view.now - arrival_s) * ageing + gamma * urgency

        read = {seq.scoring.trainer for seq in scored if seq.scoring and is_lone_score(seq)}
        items = [
            LearningItem(
                priority(step.arrival_s, step.urgency),
                step.arrival_s,
                step.sequences.values(),
                step,
                held=step.trainer in read,
            )
            for step in view.steps
        ]
        scores = [seq for seq in (*scored, *view.learning_in_order) if is_lone_score(seq)]
        for seq in scores[: view.budgets.max_sequences]:
            since = seq.request.arrival_s
            items.append(LearningItem(priority(since, _UNKNOWN_LOSS), since, [seq]))
        items.sort(key=lambda item: (-item.priority, item.arrival_s))
        oldest = min((seq.request.arrival_s for seq in queue), default=view.now)
        prompt = _PROMPT_PRIORITY + _PROMPT_AGEING * ageing * (view.now - oldest)
        for item in items:
            item.overdue = item.priority > prompt
        return items

    def _earn(self, view: View, first: LearningItem, requests: Serving) -> None:
        """Credit learning with its share of the time since the last decision."""
        if self._decided_s is not None:
            passed = min(view.now - self._decided_s, 1.0)
            least = _TRIAL_SHARE if view.latency.guessed and not requests.queue else 0.0
            self._earned_s += max(self._options.min_share, least) * passed
        self._decided_s = view.now
        most_s = self._most_earned_s(view, first.least_s(view.latency))
        self._earned_s = min(self._earned_s, most_s)

    def _most_earned_s(self, view: View, least_s: float) -> float:
        return max(self._ceiling_s(view, beside=True), least_s)

    def _learn(
        self,
        view: View,
        items: list[LearningItem],
        requests: Serving,
        seconds: float,
        full_s: float = 0.0,
        *,
        needed: bool,
    ) -> _Learning:
        """What of `items` fits beside the requests into so many seconds; with `needed`, at least
        the smallest piece."""
        room = Room(
            view.latency,
            view.block_size,
            not view.running_in_order,
            view.budgets.max_batch_tokens - requests.running_rows,
            requests.predicted_s + seconds,
            requests.work.copy(),
            view.recording_room,
            view.available_blocks - len(view.running_in_order),
            view.budgets.max_sequences - len(view.running_in_order),
            full_s,
        )
        found, left_s, before = _Learning(), room.left_s(), True
        for item in items:  # the overdue ones first
            if before and not item.overdue:  # the waiting requests come between
                room.tokens -= requests.rows - requests.running_rows
                before = False
            if item.overdue:  # what has computed nothing yet loses nothing
                found.protected |= {seq.seq_id for seq in item.sequences if seq.computed}
            first = needed and found.empty
            if left_s <= 0.0 and not first:
                continue
            forwards = room.forwards(item, first)
            if forwards:
                if item.overdue:
                    found.protected |= {each.seq_id for each in forwards}
                (found.first if item.overdue else found.last).extend(forwards)
                left_s = room.left_s()
            if item.step is not None:
                slices, after_s = slices_within(
                    item.sliced, view.latency, left_s, needed and found.empty
                )
                room.pass_s -= left_s - after_s
                left_s = after_s
                found.slices += slices
        self._spend(found, seconds - room.left_s())
        found.pass_s = view.latency.forward_s(room.work) if found.first or found.last else 0.0
        return found

    def _spend(self, found: _Learning, seconds: float) -> None:
        """Take what was found off what is earned."""
        found.spent_s = min(self._earned_s, max(0.0, seconds))
        self._earned_s -= found.spent_s

    def _slices(self, view: View, items: list[LearningItem], seconds: float) -> _Learning:
        """Slices alone, if any fit: a request that arrives waits for these, not for a pass too."""
        found = _Learning()
        if seconds > 0.0:
            steps = [step for item in items for step in item.sliced]
            found.slices, left_s = slices_within(steps, view.latency, seconds, at_least_one=False)
            self._spend(found, seconds - left_s)
        return found


def _all(sequences: list[Sequence]) -> list[Candidate]:
    return [Candidate(seq.seq_id, None, True) for seq in sequences]


def _decision(
    running: list[Sequence],
    serving: list[Candidate],
    queue: list[Candidate],
    learning: _Learning,
    *,
    gives_way: bool = False,
) -> Decision:
    """Running requests, overdue learning, waiting requests, other learning.

    Learning gives way first, but not what is overdue, then the latest of the least class.
    """
    protected = learning.protected
    return Decision.on_device(
        (*serving, *learning.first, *queue, *learning.last),
        slices=tuple(learning.slices),
        victims=tuple([seq.seq_id for seq in reversed(running) if seq.seq_id not in protected]),
        gives_way=gives_way,
    )
