"""How much time of an iteration is learning's, alone or beside the requests, and what fits in it.

Knows times and capacity. The policy decides whose turn it is and which step goes first. Invariant:
earned time is used once, and is given back if nothing came of it.
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

# Beside requests, a part of a forward is recorded only if the pass may take this share of the
# ceiling. Every recording pass reads the head's weights again, so slack is saved up for few large
# passes.
FULL_SHARE = 0.9
# An iteration takes at most this share of the time that the next request may wait.
_WAIT_SHARE = 0.25
# Share of the requests' slack that learning takes at most, from the slack ratio e
# (`Deadlines.ease`): beside them `_BESIDE_SHARE` * e; alone e * e, or e * `_ALONE_SHARE` if that is
# less; at least `_LEAST_SHARE`. The unused slack lets answers end early, so fewer of them run when
# the next requests come.
_ALONE_SHARE = 0.5
_BESIDE_SHARE = 2.0
_LEAST_SHARE = 0.02
# A preemptible pass is preferred if it may be more than so many times as long as one beside
# requests.
_MUCH_LONGER = 2.0
# If a whole ceiling is free and still nothing seems to fit, the smallest piece is tried once in
# this many seconds. Otherwise a prediction that is far too long would never be corrected.
_PROBE_S = 0.5
# Least share of the time for learning until its cost is known.
_TRIAL_SHARE = 0.05
# Largest margin for wrong predictions, relative to the time used. A missed deadline moves, but
# unused time is lost.
_MOST_MARGIN = 0.2


@dataclass(frozen=True, slots=True)
class Budget:
    """Time of one iteration, in seconds.

    Learning runs alone (`alone_s`, `pass_s`) only while no prompt waits and every running answer
    can wait for its next token.
    """

    ceiling_s: float  # longest predicted iteration
    beside_s: float  # for learning beside the requests
    full_s: float  # least length of a pass that takes only a part of a forward
    alone_s: float  # for slices alone
    pass_s: float  # for a pass of learning alone
    longer: bool  # whether a pass alone is worth more than one beside the requests
    owed: bool  # whether learning uses time that it has earned

    @property
    def nothing(self) -> bool:
        """Whether learning gets no time, unless something has to run."""
        return self.beside_s <= 0.0 and self.alone_s <= 0.0


@dataclass(slots=True)
class LearningPart:
    """What learning does in an iteration, alone or beside the requests."""

    first: list[Candidate] = field(default_factory=list)  # forwards before the waiting requests
    last: list[Candidate] = field(default_factory=list)  # forwards after the waiting requests
    slices: list[SliceCandidate] = field(default_factory=list)
    protected: set[int] = field(default_factory=set)  # seq ids that are not preempted
    spent_s: float = 0.0  # seconds taken from what was earned
    pass_s: float = 0.0  # predicted seconds of the pass
    used_s: float = 0.0  # predicted seconds of all of it
    room: Room | None = None  # what is left after it
    gives_way: bool = False  # whether it is preemptible

    @property
    def empty(self) -> bool:
        """Whether nothing fits."""
        return not (self.first or self.last or self.slices)


class LearningTime:
    """Keeps what learning has earned and not used, and how long a preemptible pass may be. The last
    pass with requests ended at `served_s` or earlier."""

    def __init__(
        self,
        deadlines: Deadlines,
        overdue: Overdue,
        ceiling_s: float,
        idle_s: float,
        min_share: float,
    ) -> None:
        """`ceiling_s`, `idle_s` and `min_share` are options of the policy."""
        self.served_s = float("-inf")
        self._deadlines = deadlines
        self._overdue = overdue
        self._ceiling = ceiling_s
        self._idle_s = idle_s
        self._min_share = min_share
        self._earned = Earnings()
        self._giving_way = GivingWay(idle_s)
        self._probed_s = float("-inf")
        # Of the last plan: its learning beside requests, and the iteration that ended before it.
        self._offered: LearningPart | None = None
        self._offered_after: int | None = None
        # Of the decision that is being made, in seconds: the smallest piece of the first item, and
        # the most that may be earned ahead.
        self._least_s = self._most_earned_s = 0.0

    def judge(self, view: View) -> bool:
        """Learn from the result of the last preemptible plan. Returns whether its pass was lost."""
        self._earned.give_back(self._giving_way.judge(view))
        return self._giving_way.lost

    def give_way(self, view: View, given: LearningPart) -> None:
        """A preemptible plan was decided."""
        self._giving_way.give(view, given.pass_s, given.spent_s)

    def offer(self, view: View, beside: LearningPart) -> None:
        """A plan with this learning beside requests was decided."""
        self._offered = None if beside.slices or beside.empty else beside
        self._offered_after = last_step(view)

    def settle(self, view: View) -> bool:
        """Give back the time of the last plan's learning beside requests if none of it was
        admitted, and return whether that is so. It happens because the blocks that requests need
        for the pass are not known exactly when the policy decides."""
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
        """Reset: there is no learning."""
        self._earned.forget()
        self._offered = None

    def alone_or_beside(
        self, view: View, items: list[LearningItem], requests: Serving, budget: Budget
    ) -> tuple[LearningPart, LearningPart]:
        """Learning in a pass without the requests, if anything fits, or else beside them."""
        alone, beside = self._slices(view, items, budget.alone_s), LearningPart()
        if not alone.empty:
            return alone, beside
        # Earned time is used beside the requests, where nothing preempts it. Without requests, it
        # is used after a lost pass.
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
            # Work that is too long beside the requests runs before them.
            needed = self.probes(view, budget)
            if needed or not first:
                alone = self.instead(view, items, budget.pass_s, needed=needed)
        return alone, beside

    def instead(
        self, view: View, items: list[LearningItem], seconds: float, *, needed: bool
    ) -> LearningPart:
        """The items that fit into a pass without the requests."""
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
        """The budget of this iteration. Called after `earn`."""
        ceiling_s = self.ceiling_s(view, beside=requests.rows > 0)
        full_s = FULL_SHARE * ceiling_s if requests.rows else 0.0
        if requests.rows:  # a pass without requests since `served_s` counts too
            ceiling_s = min(ceiling_s, self._ceiling - (view.now - self.served_s))
        ease, slack_s = self._deadlines.ease, self.spare_s(view, requests)
        share = min(1.0, max(_LEAST_SHARE, _BESIDE_SHARE * ease))
        beside_s = min(share * slack_s, ceiling_s - requests.predicted_s)
        # While prompts wait, earned time is saved until no more can be earned.
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
        """Seconds that the pass of the requests may take beyond what they need."""
        # The usual prediction error is a margin: an objective is missed every other time if it is
        # aimed at exactly.
        due_s = requests.due_s / (1.0 + min(_MOST_MARGIN, view.latency.uncertainty))
        return min(due_s, ceiling_s) - requests.predicted_s

    def ceiling_s(self, view: View, *, beside: bool) -> float:
        """Longest iteration in seconds: a request that arrives waits for its end."""
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
        """Capacity for `seconds` of learning beside the requests. Its rows include those that
        waiting requests will take."""
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
        """The items that fit into `room`. Its last `ahead` rows are for waiting requests; only
        starving items may take them. With `needed`, at least the smallest piece."""
        found, seconds, before = LearningPart(room=room), room.left_s(), True
        left_s = seconds
        for item in items:  # starving ones first
            if before and not item.overdue:  # the waiting requests come before this item
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
        """Slices alone, if any fit. A new request waits for these only, not for a pass too."""
        found = LearningPart()
        if seconds > 0.0:
            steps = [step for item in items if (step := item.sliced) is not None]
            found.slices, left_s = slices_within(steps, view.latency, seconds, at_least_one=False)
            found.used_s = seconds - left_s
            found.spent_s = self._earned.spend(found.used_s)
        return found
