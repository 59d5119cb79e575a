"""Serve everything online first; offline requests and learning share what is left of the
iteration's rows and time.

Training forwards fill the pass that decodes need anyway (fused), backward slices the time until the
most urgent answer is due; learning alone ends between two layers when a request comes. MACE's
priority (section 4.1) orders the steps, and lets one that has waited long go before prompts; a
share of the time is learning's however many requests there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from tandem.core.decision import Candidate, Decision
from tandem.core.sequence import Sequence
from tandem.estimators.work import PassWork
from tandem.scheduling.policies.unified.deadlines import Deadlines
from tandem.scheduling.policies.unified.earnings import Balance, Earnings
from tandem.scheduling.policies.unified.learning_time import FULL_SHARE, LearningPart, LearningTime
from tandem.scheduling.policies.unified.load import Load
from tandem.scheduling.policies.unified.offline import OfflineRequests, any_offline, set_apart
from tandem.scheduling.policies.unified.overdue import Overdue
from tandem.scheduling.policies.unified.room import (
    PIECE_TOKENS,
    LearningItem,
    Room,
    half_computed,
    stands_in_the_way,
)
from tandem.scheduling.policies.unified.serving import Serving, foresee, joins
from tandem.scheduling.policies.unified.turns import Turns
from tandem.scheduling.queues import is_lone_score, num_online, startable_scores
from tandem.scheduling.view import Policy, Traits, View

# What a score counts as urgent: a sample whose loss is unknown (log 2).
_UNKNOWN_LOSS = 0.6931471805599453
# MACE's priorities: prompts begin one above learning and age at a quarter of its rate.
_PROMPT_PRIORITY = 1.0
_PROMPT_AGEING = 0.25
# Once an iteration had no time for learning, it is not looked at in the next one, and after several
# in a row in so many, for so long at most: to look for what does not fit takes time, too.
_MOST_UNASKED = 15
_UNASKED_S = 0.1


@dataclass(frozen=True, slots=True)
class Options:
    """Dials of the policy.

    `ceiling_s` bounds an iteration's predicted time beside requests (one that arrives waits for its
    end), and so does a quarter of what requests of late could have waited without missing their
    TTFT objective; `idle_s` that of learning alone, which gives way. `min_share` of the time is
    learning's under any load, and more while no prompt waits until it is known what learning
    costs. `patience_s` is after how long a step of no urgency goes before prompts (one over MACE's
    delta_ft); `gamma` weighs urgency. `temporal_only` keeps learning out of passes with requests
    (for comparison).
    `late_share` of the starts are of requests that are too late for their TTFT objective, while
    others are not, and an answer that came too late has a row in this share of the passes with
    prompts (1: first come, first served). Of the time that online requests leave, `offline_share`
    is offline requests', if learning wants it too; `min_share` is theirs as it is learning's. One
    that has got no token for `offline_patience_s`, while others started, goes before online ones
    and learning; of the starts they have at most `overdue_share`.
    """

    ceiling_s: float = 0.25
    idle_s: float = 0.5
    min_share: float = 0.002
    patience_s: float = 30.0
    gamma: float = 0.3
    temporal_only: bool = False
    late_share: float = 0.125
    offline_share: float = 0.5
    offline_patience_s: float = 30.0
    overdue_share: float = 0.05

    def __post_init__(self) -> None:
        if min(self.ceiling_s, self.idle_s, self.patience_s, self.offline_patience_s) <= 0.0:
            raise ValueError("ceiling_s, idle_s, patience_s and offline_patience_s must be above 0")
        shares = (self.min_share, self.late_share, self.overdue_share)
        if not 0.0 < min(shares) <= max(shares) <= 1.0:
            raise ValueError("min_share, late_share and overdue_share must be above 0, at most 1")
        if not 0.0 < self.offline_share < 1.0:
            raise ValueError("offline_share is a share: above 0 and below 1")


def create(options: Options = Options()) -> Policy:
    """The policy of this file."""
    return Unified(options)


@dataclass(slots=True)
class _Offline:
    """What of offline requests fits, the seconds that it adds, and the room after it; whether it
    was their `turn` to choose before learning."""

    candidates: list[Candidate] = field(default_factory=list)
    used_s: float = 0.0
    room: Room | None = None
    turn: bool = False


class Unified:
    """See the module. Remembers how much time learning has earned but not used, which deadlines
    have moved, and whose turn it is."""

    traits = Traits(decodes_alike=True, records_in_parts=True)

    def __init__(self, options: Options) -> None:
        self._options = options
        self._deadlines = Deadlines()
        self._turns = Turns(options.late_share)
        self._load = Load()
        self._overdue = Overdue(options.overdue_share, options.offline_patience_s)
        self._time = LearningTime(
            self._deadlines, self._overdue, options.ceiling_s, options.idle_s, options.min_share
        )
        self._offline_earned = Earnings()
        self._balance = Balance(options.offline_share)
        self._served = False
        self._gave_way = False  # the last plan did, or the one before and its pass was lost
        self._in_vain = 0  # how many times in a row learning was looked at and got nothing
        self._unasked = 0  # how many iterations are still to come in which it is not looked at
        self._asked_s = 0.0
        self._counted_s = 0.0  # what of the last plan's learning is in the balance

    def decide(self, view: View) -> Decision:  # noqa: C901, PLR0915
        """See the module."""
        self._load.note(view)
        served, self._served = self._served, True
        if served:
            self._time.served_s = view.now
        refused = self._time.settle(view)
        if self._gave_way:
            self._gave_way = self._time.judge(view)
        if refused or self._gave_way:
            self._balance.give_back(self._counted_s)
        self._counted_s = 0.0
        running, serving = view.running_in_order, view.serving
        learns = bool(view.learning or view.steps or (running and running[-1].scoring is not None))
        batch = any_offline(view, serving)
        if not (learns or batch):
            self._forget()
            return self._serve_only(view, running, serving)
        if self._unasked and serving and not batch and view.now < self._asked_s + _UNASKED_S:
            self._unasked -= 1
            return self._serve_only(view, running, serving)
        scored, offline = running[len(serving) :], OfflineRequests()
        # Offline requests give way to online ones that wait.
        online = num_online(serving) if batch else len(serving)
        queue = self._turns.queue(view, max(0, view.budgets.max_sequences - online) + 1)
        if batch:
            queue = self._overdue.queue(view, queue)
            overdue = self._overdue.sequence
            serving, queue, offline = set_apart(view, serving, queue, overdue, learns=learns)
        items = self._items(view, scored, queue) if learns else []
        if not (items or batch):
            self._forget()
            return self._serve_only(view, running, serving)
        # Prompts that wait for the blocks of overdue learning take no time until it is through.
        if queue and stands_in_the_way(view, items, serving, queue[0]):
            queue = []
        load = self._load
        requests = foresee(view, self._deadlines, serving, queue, load.busy, load.began_s)
        kept = {seq.seq_id for seq in half_computed(items)}
        yielding = self._overdue.victims(running)
        if items:
            self._time.earn(view, items[0], requests)
        else:
            self._time.forget()
        if not offline:
            self._offline_earned.forget()
        alone, beside, found = self._share(view, items, offline, requests, served=served)
        nothing = alone.empty and beside.empty
        patient = bool(items) and not items[0].overdue
        self._look_again(view.now, vain=patient and nothing and served)
        if not alone.empty:
            self._served = False
            if alone.gives_way:
                self._gave_way = True
                self._time.give_way(view, alone)
                self._counted_s = alone.used_s if offline else 0.0
            return _decision(yielding, (alone.first, alone.last), alone, kept)
        if nothing and not found.candidates:
            serving, resting = self._taking_part(view, serving, requests.joining)
            kept |= resting
        load.offer(requests.joining)
        self._time.offer(view, beside)
        self._counted_s = beside.used_s if offline else 0.0
        ours, theirs = (found.candidates, []) if found.turn else ([], found.candidates)
        order = (
            self._overdue.serve(view, serving),
            beside.first,
            _all(requests.joining),
            ours,
            beside.last,
            theirs,
        )
        return _decision(yielding, order, beside, kept)

    def _look_again(self, now: float, *, vain: bool) -> None:
        """When to look at learning again, after a look in `vain` or not."""
        self._in_vain = min(self._in_vain + 1, _MOST_UNASKED) if vain else 0
        self._unasked, self._asked_s = self._in_vain, now

    def _forget(self) -> None:
        """There is nothing but online requests."""
        self._time.forget()
        self._offline_earned.forget()
        self._in_vain = self._unasked = 0

    def _share(
        self,
        view: View,
        items: list[LearningItem],
        offline: OfflineRequests,
        requests: Serving,
        *,
        served: bool,
    ) -> tuple[LearningPart, LearningPart, _Offline]:
        """What learning does without the online requests and beside them, and what of offline ones
        runs, in the room that they leave."""
        alone, beside, found = LearningPart(), LearningPart(), _Offline()
        turn = bool(offline) and (not items or self._balance.first)
        if turn:
            found = self._serve_offline(view, items, offline, requests, beside)
        if found.candidates and found.room is not None:
            if not self._options.temporal_only:
                beside = self._time.fill(view, items, found.room, 0, needed=False)
        elif items:
            alone, beside = self._learn(view, items, requests, served=served)
        apart = self._options.temporal_only and not beside.empty
        if alone.empty and offline and not (found.candidates or apart):
            found = self._serve_offline(view, items, offline, requests, beside)
        if items and offline:
            self._balance.count(view.now, found.used_s, alone.used_s + beside.used_s)
        found.turn = turn
        return alone, beside, found

    def _serve_offline(
        self,
        view: View,
        items: list[LearningItem],
        offline: OfflineRequests,
        requests: Serving,
        beside: LearningPart,
    ) -> _Offline:
        """Offline requests beside the others and what learning has had of their room; what it has
        earned is not theirs, nor what they have earned its."""
        latency, ceiling_s = view.latency, self._time.ceiling_s(view, beside=True)
        least = PassWork()
        least.span(0, PIECE_TOKENS)
        least_s = latency.added_s(least)
        earned, free = self._offline_earned, offline.alone and not items
        if free:  # nobody else wants the time, so that none is waited for
            earned.forget()
        else:
            earned.earn(view.now, self._options.min_share, max(ceiling_s, least_s))
        owed_s = earned.seconds if earned.seconds >= least_s else 0.0
        spare_s = self._time.spare_s(view, requests, ceiling_s) - beside.used_s
        room = beside.room
        if room is None:
            room = self._time.room(view, items, requests, 0.0, FULL_SHARE * ceiling_s)
            room.tokens -= requests.rows - requests.running_rows
        before_s = room.work_s
        room.pass_s = before_s + max(owed_s, spare_s)
        room.leave(requests.queue)
        found = room.serve(
            offline.running,
            offline.begin(view),
            every_decode=offline.alone and beside.empty,
            needed=free or owed_s > 0.0 or (not requests.rows and beside.empty),
        )
        used_s = room.work_s - before_s
        earned.spend(used_s)
        room.pass_s = before_s + max(used_s, spare_s)
        return _Offline(found, used_s, room)

    def _learn(
        self, view: View, items: list[LearningItem], requests: Serving, *, served: bool
    ) -> tuple[LearningPart, LearningPart]:
        """What learning does without the requests, if anything, or else beside them."""
        budget = self._time.budget(view, requests)
        if requests.rows and budget.nothing:
            return LearningPart(), LearningPart()
        if not (self._options.temporal_only and requests.rows):
            alone, beside = self._time.alone_or_beside(view, items, requests, budget)
            alone.gives_way = True
            return alone, beside
        alone = LearningPart()
        if served:  # else it is the requests' turn
            alone = self._time.instead(view, items, budget.beside_s, needed=False)
        if served and alone.empty and self._time.probes(view, budget):
            alone = self._time.instead(view, items, budget.beside_s, needed=True)
        alone.gives_way = not budget.owed
        return alone, LearningPart()

    def _serve_only(self, view: View, running: list[Sequence], serving: list[Sequence]) -> Decision:
        """Requests alone: the usual case, and the one that must cost least."""
        queue = self._turns.queue(view, max(0, view.budgets.max_sequences - len(serving)) + 1)
        joining = joins(view, serving, queue, self._load.busy, self._load.began_s)
        self._load.offer(joining)
        serving, resting = self._taking_part(view, serving, joining)
        order = [*_all(serving), *_all(joining)]
        return Decision.on_device(tuple(order), victims=_victims(running, resting))

    def _taking_part(
        self, view: View, serving: list[Sequence], joining: list[Sequence]
    ) -> tuple[list[Sequence], set[int]]:
        """The running requests that take part in a pass of requests alone, and the numbers of the
        others: what is of a lower class has no place that an answer leaves."""
        if not joining:
            return serving, set()
        resting = self._turns.resting(view, serving, joining, self._load.busy)
        if resting:
            serving = [seq for seq in serving if seq.seq_id not in resting]
        return serving, resting

    def _items(
        self, view: View, scored: list[Sequence], queue: list[Sequence]
    ) -> list[LearningItem]:
        """Learning work by MACE's priority; overdue is what has passed the oldest prompt."""
        ageing, gamma, now = 1.0 / self._options.patience_s, self._options.gamma, view.now
        read = {seq.scoring.trainer for seq in scored if seq.scoring and is_lone_score(seq)}
        items = []
        for step in view.steps:
            since, held = step.arrival_s, bool(read) and step.trainer in read
            priority = (now - since) * ageing + gamma * step.urgency
            waits = step.sequences.values()
            items.append(LearningItem(priority, since, waits, step, held=held))
        scores = [*filter(is_lone_score, scored), *startable_scores(view)]
        for seq in scores[: view.budgets.max_sequences]:
            since = seq.request.arrival_s
            priority = (now - since) * ageing + gamma * _UNKNOWN_LOSS
            items.append(LearningItem(priority, since, [seq]))
        items.sort(key=lambda item: (-item.priority, item.arrival_s))
        oldest = min([seq.request.arrival_s for seq in queue], default=now)
        prompt = _PROMPT_PRIORITY + _PROMPT_AGEING * ageing * (now - oldest)
        for item in items:
            if not item.priority > prompt:  # nor is any that comes after it
                break
            item.overdue = True
        return items


def _all(sequences: list[Sequence]) -> list[Candidate]:
    return [Candidate(seq.seq_id, None, True) for seq in sequences]


def _decision(
    yielding: list[Sequence],
    order: tuple[list[Candidate], ...],
    learning: LearningPart,
    kept: set[int],
) -> Decision:
    """Learning gives way first, but not what is overdue (`kept` of it has computed something), then
    the latest of the least class."""
    protected = learning.protected | kept
    return Decision.on_device(
        tuple(chain.from_iterable(order)),
        slices=tuple(learning.slices),
        victims=_victims(yielding, protected),
        gives_way=learning.gives_way,
    )


def _victims(running: list[Sequence], protected: set[int]) -> tuple[int, ...]:
    """Who gives way, in order: whoever came last by class and arrival."""
    found = [seq.seq_id for seq in reversed(running)]
    return tuple([each for each in found if each not in protected] if protected else found)
