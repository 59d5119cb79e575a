"""How much of an iteration is learning's, alone or beside the requests, and what of it fits there.

Knows times and room; whose turn it is and which step goes first is the policy's. Invariant: what
was earned is used once, and given back if nothing came of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tandem.core.decision import Candidate, SliceCandidate
from tandem.scheduling.policies.unified.deadlines import Deadlines
from tandem.scheduling.policies.unified.earnings import Earnings
from tandem.scheduling.policies.unified.giving_way import GivingWay
from tandem.scheduling.policies.unified.load import last_step
from tandem.scheduling.policies.unified.overdue import Overdue
from tandem.scheduling.policies.unified.room import LearningItem, Room, half_computed, most_blocks
from tandem.scheduling.policies.unified.serving import Serving
from tandem.scheduling.queues import slices_within
from tandem.scheduling.view import View

# A pass beside requests records when it may take this share of the ceiling: each pass that records
# streams the head again, so slack is saved up for few large ones.
FULL_SHARE = 0.9
# Of the time that a request which comes next may wait, an iteration takes at most so much.
_WAIT_SHARE = 0.25
# Of the slack of the requests, learning takes at most so much at once: of what the last ones had
# left of their objectives (`Deadlines.ease`), beside them so many times, and alone its square, at
# most this share of it; the least share at any rate. What is kept lets answers end early, and fewer
# run when the next ones come.
_ALONE_SHARE = 0.5
_BESIDE_SHARE = 2.0
_LEAST_SHARE = 0.02
# A pass that gives way is preferred to one beside requests that could take less than half as long.
_MUCH_LONGER = 2.0
# Where a whole ceiling is free and yet nothing seems to fit, the smallest piece of it is tried
# once in so many seconds: a prediction that is far too long is never corrected otherwise.
_PROBE_S = 0.5
# Of the time, learning has at least this much until what it costs is known.
_TRIAL_SHARE = 0.05
# Of the slack, at most so much more than is used is kept for wrong predictions: a deadline that is
# missed moves, but time that is not used is gone.
_MOST_MARGIN = 0.2


@dataclass(frozen=True, slots=True)
class Budget:
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

    @property
    def nothing(self) -> bool:
        """Whether learning gets no time, unless it is needed that something runs."""
        return self.beside_s <= 0.0 and self.alone_s <= 0.0


@dataclass(slots=True)
class LearningPart:
    """Forwards before and after the waiting requests, slices, and which forwards are not preempted;
    what of it was earned, how long the pass and all of it were predicted to be, and the room after
    it."""

    first: list[Candidate] = field(default_factory=list)
    last: list[Candidate] = field(default_factory=list)
    slices: list[SliceCandidate] = field(default_factory=list)
    protected: set[int] = field(default_factory=set)
    spent_s: float = 0.0
    pass_s: float = 0.0
    used_s: float = 0.0
    room: Room | None = None
    gives_way: bool = False

    @property
    def empty(self) -> bool:
        """Whether nothing was found to fit."""
        return not (self.first or self.last or self.slices)


class LearningTime:
    """Remembers what learning has earned and not used, how long a pass that gives way may be, and
    when the last pass with requests ended (`served_s`, at the latest)."""

    def __init__(
        self,
        deadlines: Deadlines,
        overdue: Overdue,
        ceiling_s: float,
        idle_s: float,
        min_share: float,
    ) -> None:
        """See the options of the policy."""
        self.served_s = float("-inf")
        self._deadlines = deadlines
        self._overdue = overdue
        self._ceiling = ceiling_s
        self._idle_s = idle_s
        self._min_share = min_share
        self._earned = Earnings()
        self._giving_way = GivingWay(idle_s)
        self._probed_s = float("-inf")
        # Of the last plan: what it has beside requests, and which plan came before it.
        self._offered: LearningPart | None = None
        self._offered_after: int | None = None
        # Of the decision that is being made: the smallest piece of what is first, and what may be
        # earned ahead.
        self._least_s = self._most_earned_s = 0.0

    def judge(self, view: View) -> bool:
        """Learn from what came of the last plan that gave way; whether its pass was lost."""
        self._earned.give_back(self._giving_way.judge(view))
        return self._giving_way.lost

    def give_way(self, view: View, given: LearningPart) -> None:
        """A plan that gives way was decided."""
        self._giving_way.give(view, given.pass_s, given.spent_s)

    def offer(self, view: View, beside: LearningPart) -> None:
        """A plan with this beside requests was decided."""
        self._offered = None if beside.slices or beside.empty else beside
        self._offered_after = last_step(view)

    def settle(self, view: View) -> bool:
        """Take back what the last plan's learning beside requests was to cost, if none of it was
        admitted: what requests need for the pass itself is not known here to the last block.
        Whether that was so."""
        if (offered := self._offered) is None:
            return False
        self._offered, plan = None, view.last_plan
        if plan is not None and last_step(view) != self._offered_after:
            wanted = {each.seq_id for each in (*offered.first, *offered.last)}
            if any(span.seq_id in wanted for lane in plan.lanes for span in lane.spans):
                return False
        self._earned.give_back(offered.spent_s)
        return True

    def forget(self) -> None:
        """There is nothing to learn."""
        self._earned.forget()
        self._offered = None

    def alone_or_beside(
        self, view: View, items: list[LearningItem], requests: Serving, budget: Budget
    ) -> tuple[LearningPart, LearningPart]:
        """What learning does in a pass without the requests, if anything, or else beside them."""
        alone, beside = self._slices(view, items, budget.alone_s), LearningPart()
        if not alone.empty:
            return alone, beside
        # What it has earned, learning gets beside the requests; without any, after a lost pass.
        idle = not requests.rows
        owed = budget.owed and (not idle or self._giving_way.lost)
        first = not owed and (idle or budget.longer)
        if first:
            alone = self.instead(view, items, budget.pass_s, needed=idle)
        if alone.empty:
            room = self.room(view, items, requests, budget.beside_s, budget.full_s)
            ahead = requests.rows - requests.running_rows
            beside = self.fill(view, items, room, ahead, needed=idle)
        if alone.empty and beside.empty:
            # What is too long beside requests goes before them.
            needed = self.probes(view, budget)
            if needed or not first:
                alone = self.instead(view, items, budget.pass_s, needed=needed)
        return alone, beside

    def instead(
        self, view: View, items: list[LearningItem], seconds: float, *, needed: bool
    ) -> LearningPart:
        """What of `items` fits into a pass without the requests."""
        if seconds <= 0.0 and not needed:
            return LearningPart()
        return self.fill(view, items, self.room(view, items, Serving(), seconds), 0, needed=needed)

    def probes(self, view: View, budget: Budget) -> bool:
        """Whether it is time to try the smallest piece although it seems not to fit."""
        free = budget.alone_s >= budget.ceiling_s and self.served_s == view.now
        if not free or view.now - self._probed_s < _PROBE_S:
            return False
        self._probed_s = view.now
        return True

    def budget(self, view: View, requests: Serving) -> Budget:
        """See `Budget`; after `earn`."""
        ceiling_s = self.ceiling_s(view, beside=requests.rows > 0)
        full_s = FULL_SHARE * ceiling_s if requests.rows else 0.0
        if requests.rows:  # a pass without them comes out of the same pause
            ceiling_s = min(ceiling_s, self._ceiling - (view.now - self.served_s))
        ease, slack_s = self._deadlines.ease, self.spare_s(view, requests)
        share = min(1.0, max(_LEAST_SHARE, _BESIDE_SHARE * ease))
        beside_s = min(share * slack_s, ceiling_s - requests.predicted_s)
        # While prompts wait, what is earned does too, until nothing more can be.
        least_s = self._least_s
        owed_s = self._most_earned_s if requests.queue else least_s
        owed = self._earned.seconds >= owed_s
        if owed:
            beside_s, full_s = max(beside_s, self._earned.seconds), 0.0
        alone_s = 0.0
        if not requests.rows:
            alone_s = self._idle_s
        elif not requests.queue:
            pause_s = self._ceiling - (view.now - self.served_s)
            alone_s = min(max(_LEAST_SHARE, min(_ALONE_SHARE, ease) * ease) * slack_s, pause_s)
        pass_s = min(alone_s, max(self._giving_way.pass_s, least_s))
        if pass_s < least_s:
            pass_s = 0.0
        longer = self._giving_way.pass_s >= least_s and pass_s > _MUCH_LONGER * beside_s
        return Budget(ceiling_s, beside_s, full_s, alone_s, pass_s, longer, owed)

    def spare_s(self, view: View, requests: Serving, ceiling_s: float = math.inf) -> float:
        """What the pass of the requests may take longer than they need."""
        # What predictions are usually off by is not given away: an objective that is aimed at
        # exactly is missed every other time.
        due_s = requests.due_s / (1.0 + min(_MOST_MARGIN, view.latency.uncertainty))
        return min(due_s, ceiling_s) - requests.predicted_s

    def ceiling_s(self, view: View, *, beside: bool) -> float:
        """The longest iteration: a request that arrives waits for its end."""
        most_s = self._ceiling if beside else self._idle_s
        return min(most_s, _WAIT_SHARE * self._deadlines.wait_s(view))

    def earn(self, view: View, first: LearningItem, requests: Serving) -> None:
        """Credit learning with its share of the time since the last decision."""
        least = _TRIAL_SHARE if view.latency.guessed and not requests.queue else 0.0
        share = max(self._min_share, least)
        self._least_s = first.least_s(view.latency)
        self._most_earned_s = max(self.ceiling_s(view, beside=True), self._least_s)
        self._earned.earn(view.now, share, self._most_earned_s)

    def room(
        self,
        view: View,
        items: list[LearningItem],
        requests: Serving,
        seconds: float,
        full_s: float = 0.0,
    ) -> Room:
        """Room for so many seconds beside the requests; of the rows, those of waiting ones too."""
        running = len(view.running_in_order)
        return Room(
            view.latency,
            view.block_size,
            not running,
            view.budgets.max_batch_tokens - requests.running_rows,
            requests.predicted_s + seconds,
            requests.work.copy(),
            requests.predicted_s,
            view.recording_room,
            view.available_blocks - running,
            view.budgets.max_sequences - running,
            full_s,
            most_blocks(view, [*half_computed(items), *self._overdue.kept]),
        )

    def fill(
        self, view: View, items: list[LearningItem], room: Room, ahead: int, *, needed: bool
    ) -> LearningPart:
        """What of `items` fits into the room, of which `ahead` rows are for waiting requests, but
        for what is overdue; with `needed`, at least the smallest piece."""
        found, seconds, before = LearningPart(room=room), room.left_s(), True
        left_s = seconds
        for item in items:  # the overdue ones first
            if before and not item.overdue:  # the waiting requests come between
                room.tokens -= ahead
                before = False
            first = needed and found.empty
            if left_s <= 0.0 and not first:
                continue
            forwards = room.forwards(item, first)
            if forwards:
                if item.overdue:
                    found.protected |= {each.seq_id for each in forwards}
                (found.first if item.overdue else found.last).extend(forwards)
                left_s = room.left_s()
            step = item.sliced
            if step is not None:
                slices, after_s = slices_within(
                    [step], view.latency, left_s, needed and found.empty
                )
                room.pass_s -= left_s - after_s
                left_s = after_s
                found.slices += slices
        room.tokens -= ahead if before else 0
        found.used_s = seconds - room.left_s()
        found.spent_s = self._earned.spend(found.used_s)
        found.pass_s = room.work_s if found.first or found.last else 0.0
        return found

    def _slices(self, view: View, items: list[LearningItem], seconds: float) -> LearningPart:
        """Slices alone, if any fit: a request that arrives waits for these, not for a pass too."""
        found = LearningPart()
        if seconds > 0.0:
            steps = [step for item in items if (step := item.sliced) is not None]
            found.slices, left_s = slices_within(steps, view.latency, seconds, at_least_one=False)
            found.used_s = seconds - left_s
            found.spent_s = self._earned.spend(found.used_s)
        return found
