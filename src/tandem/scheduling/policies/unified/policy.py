"""Serves online requests first. Offline requests and learning share the remaining rows and time.

Training forwards share the pass that decodes need anyway. Backward slices use the slack until the
most urgent token is due. Learning that runs alone is preempted between two layers when a request
comes. MACE's priority (section 4.1) orders the steps, and a step that has waited long goes before
prompts. A minimum share of the time is learning's under any load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from tandem.core.decision import Candidate, Decision
from tandem.core.sequence import Sequence
from tandem.estimators.work import PassWork
from tandem.kv.eviction import ByClass
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

# Urgency of a score: that of a sample whose loss is unknown (log 2).
_UNKNOWN_LOSS = 0.6931471805599453
# MACE's priorities: prompts begin one above learning and age at a quarter of its rate.
_PROMPT_PRIORITY = 1.0
_PROMPT_AGEING = 0.25
# It takes time to find out that no learning fits. So after n iterations in a row in which none
# fits, the next n skip learning: at most `_MOST_UNASKED`, for at most `_UNASKED_S` seconds.
_MOST_UNASKED = 15
_UNASKED_S = 0.1


@dataclass(frozen=True, slots=True)
class Options:
    """Dials of the policy; `docs/unified.md` has the rules."""

    # Longest predicted iteration beside requests, in seconds: a new request waits for its end.
    # Another limit is a quarter of what recent requests could have waited within their TTFT
    # objective.
    ceiling_s: float = 0.25
    idle_s: float = 0.5  # longest iteration of learning alone, in seconds; it is preemptible
    # Share of the time for learning, and for offline requests, under any load. Learning gets more
    # while no prompt waits, until its cost is known.
    min_share: float = 0.002
    # Seconds after which a step of no urgency goes before prompts (1 / MACE's delta_ft).
    patience_s: float = 30.0
    gamma: float = 0.3  # weight of urgency
    temporal_only: bool = False  # learning shares no pass with requests (for comparison)
    # Under overload: share of the starts that go to late requests (past their TTFT objective). Also
    # the share of prompt passes in which late answers get a row. 1: first come, first served.
    late_share: float = 0.125
    # Offline requests' share of the time that online requests leave, while learning has work, too.
    offline_share: float = 0.5
    # Seconds without a token, while others started, after which the oldest offline request that
    # runs, or that waits if none runs, is starving. It then goes before online requests and
    # learning.
    offline_patience_s: float = 30.0
    # Largest share of the starts for starving requests; share of the starts of offline requests for
    # the one that came first.
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
    """Offline requests that fit into an iteration."""

    candidates: list[Candidate] = field(default_factory=list)
    used_s: float = 0.0  # seconds that they add
    room: Room | None = None  # what is left after them
    turn: bool = False  # whether they chose before learning


class Unified:
    """Keeps learning's unused earned time, the deadlines that have moved, and whose turn it is."""

    traits = Traits(decodes_alike=True, records_in_parts=True, eviction=ByClass())

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
        self._begun = 0  # offline requests that began since the oldest one had its turn
        self._balance = Balance(options.offline_share)
        self._served = False
        self._gave_way = False  # the last plan was preemptible, or the one before lost its pass
        self._in_vain = 0  # iterations in a row in which no learning fit
        self._unasked = 0  # iterations that still skip learning
        self._asked_s = 0.0
        self._counted_s = 0.0  # seconds of the last plan's learning in the balance

    def decide(self, view: View) -> Decision:  # noqa: C901, PLR0915
        """Online requests first, then offline requests and learning as time and capacity allow."""
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
        # Waiting online requests preempt offline ones, so only online ones count as taken slots.
        online = num_online(serving) if batch else len(serving)
        queue = self._turns.queue(view, max(0, view.budgets.max_sequences - online) + 1)
        if batch:
            queue = self._overdue.queue(view, queue)
            overdue = self._overdue.sequence
            turn = self._begun * self._options.overdue_share >= 1.0
            serving, queue, offline = set_apart(
                view, serving, queue, overdue, learns=learns, oldest_first=turn
            )
        items = self._items(view, scored, queue) if learns else []
        if not (items or batch):
            self._forget()
            return self._serve_only(view, running, serving)
        # A prompt that waits for the blocks of starving learning takes no time until that is done.
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
        """Note when to try learning again; `vain`: nothing of it fit this time."""
        self._in_vain = min(self._in_vain + 1, _MOST_UNASKED) if vain else 0
        self._unasked, self._asked_s = self._in_vain, now

    def _forget(self) -> None:
        """Reset: there are only online requests."""
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
        """Learning without the online requests, learning beside them, and offline requests, in the
        time and capacity that online requests leave."""
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
        """Offline requests beside the online ones, after `beside` took its part. Offline requests
        do not use the time that learning earned, and learning does not use theirs."""
        latency, ceiling_s = view.latency, self._time.ceiling_s(view, beside=True)
        least = PassWork()
        least.span(0, PIECE_TOKENS)
        least_s = latency.added_s(least)
        earned, free = self._offline_earned, offline.alone and not items
        if free:  # no other work wants the time, so nothing is earned by waiting
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
        waits = {seq.seq_id for seq in offline.waiting}
        if begun := sum([each.seq_id in waits for each in found]):
            turn = self._begun * self._options.overdue_share >= 1.0
            self._begun = 0 if turn else self._begun + begun
        return _Offline(found, used_s, room)

    def _learn(
        self, view: View, items: list[LearningItem], requests: Serving, *, served: bool
    ) -> tuple[LearningPart, LearningPart]:
        """Learning without the requests, if it gets anything, or else beside them."""
        budget = self._time.budget(view, requests)
        if requests.rows and budget.nothing:
            return LearningPart(), LearningPart()
        if not (self._options.temporal_only and requests.rows):
            alone, beside = self._time.alone_or_beside(view, items, requests, budget)
            alone.gives_way = True
            return alone, beside
        alone = LearningPart()
        if served:  # otherwise it is the requests' turn
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
        """The running requests that have a row in a pass of requests alone, and the ids of the
        paused ones. Lower classes do not get the place of a paused answer."""
        if not joining:
            return serving, set()
        resting = self._turns.resting(view, serving, joining, self._load.busy)
        if resting:
            serving = [seq for seq in serving if seq.seq_id not in resting]
        return serving, resting

    def _items(
        self, view: View, scored: list[Sequence], queue: list[Sequence]
    ) -> list[LearningItem]:
        """Learning work by MACE's priority. Work that ranks above the oldest prompt is starving."""
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
            if not item.priority > prompt:  # nor is any later item
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
    """Preempt learning first, then the latest arrival of the lowest class. Protected are starving
    learning and the ids in `kept`."""
    protected = learning.protected | kept
    return Decision.on_device(
        tuple(chain.from_iterable(order)),
        slices=tuple(learning.slices),
        victims=_victims(yielding, protected),
        gives_way=learning.gives_way,
    )


def _victims(running: list[Sequence], protected: set[int]) -> tuple[int, ...]:
    """Ids in the order of preemption: the last by class and arrival first."""
    found = [seq.seq_id for seq in reversed(running)]
    return tuple([each for each in found if each not in protected] if protected else found)
