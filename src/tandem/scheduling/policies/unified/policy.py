"""Serves online requests first. Offline requests and learning fill what is left of the iteration.

A decision has five steps: observe, budget, rank, fill, emit. What an iteration has left is one
ledger. Against starvation each class has one deficit counter. Learning that runs without the online
requests is preempted between two layers when a request comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tandem.core.decision import Candidate, Decision, SliceCandidate
from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.kv.eviction import ByClass
from tandem.scheduling.policies.unified.deadlines import Deadlines, margin
from tandem.scheduling.policies.unified.ledger import Ledger
from tandem.scheduling.policies.unified.memory import EndTables, PeakMemory
from tandem.scheduling.policies.unified.observe import Observer, Scene
from tandem.scheduling.policies.unified.online import OnlinePass, last_step, start_of
from tandem.scheduling.policies.unified.rest import LearningItem, offline_value
from tandem.scheduling.view import Policy, Traits, View

# Longest iteration of learning while there are no requests, in seconds. It is preemptible.
_IDLE_S = 0.5
# An iteration takes at most this share of the time that the next request may wait.
_WAIT_SHARE = 0.25
_MOST_KEPT = 0.95  # largest share of their slack that answers keep for the next prompt
# Largest share of the slack that learning takes alone.
_ALONE_SHARE = 0.5
# Beside requests, learning takes an iteration of its own only if it may be so many times as long as
# what the loop takes of each iteration.
_OVERHEADS = 8.0
# A pass of learning alone is worth it if it may be so many times as long as beside the requests.
_MUCH_LONGER = 2.0
# The next preemptible pass is this much shorter after a lost one, and longer after a completed one:
# about one in five is lost, whatever the load.
_AFTER_LOSS, _AFTER_END = 0.5, 1.2
# Where both offline requests and learning want the spare time: share of the time of the one that is
# worth more which the other one earns.
_SECOND_SHARE = 0.125


@dataclass(frozen=True, slots=True)
class Options:
    """Dials of the policy; `docs/unified.md` has the rules."""

    # Longest predicted iteration beside requests, in seconds: a new request waits for its end.
    # Another limit is a quarter of what recent requests could have waited.
    ceiling_s: float = 0.25
    # Share of the time that learning, and the oldest offline request, earn under any load.
    min_share: float = 0.002
    # Seconds of waiting after which they go before new online requests. In the order of the steps,
    # an age of so many seconds counts as 1.
    patience_s: float = 30.0
    training_weight: float = 8.0  # offline tokens that one trained token is worth
    temporal_only: bool = False  # learning shares no pass with requests (for comparison)

    def __post_init__(self) -> None:
        if min(self.ceiling_s, self.patience_s, self.training_weight) <= 0.0:
            raise ValueError("ceiling_s, patience_s and training_weight must be above 0")
        if not 0.0 < self.min_share <= 1.0:
            raise ValueError("min_share must be above 0, at most 1")


def create(options: Options = Options()) -> Policy:
    """The policy of this file."""
    return Unified(options)


@dataclass(slots=True)
class _Budget:
    """The pass of the online requests, and times in seconds."""

    online: OnlinePass
    spare_s: float = 0.0  # that the pass may take beyond what the online requests need
    alone_s: float = 0.0  # for learning without the online requests, while none of them waits


# Work of one rank: its value per second, its sequences (none: all of learning), and if it is one
# prompt, the first position to compute and the blocks that it needs beside those that others hold.
_Ranked = tuple[float, list[Sequence], int, int]


@dataclass(slots=True)
class _Plan:
    """What runs besides the online requests, or without them."""

    before: list[Candidate] = field(default_factory=list)  # starving learning
    after: list[Candidate] = field(default_factory=list)  # after the waiting online requests
    slices: list[SliceCandidate] = field(default_factory=list)
    alone: bool = False  # learning, without the online requests
    preemptible: bool = False
    learned: set[int] = field(default_factory=set)  # ids of learning's sequences
    learned_s: float = 0.0  # seconds of learning
    offline_s: float = 0.0  # seconds of offline requests
    spent_s: float = 0.0  # those that the deficit counter counts
    pass_s: float = 0.0  # seconds of a preemptible pass
    step: int | None = None  # the iteration that ended before

    @property
    def learns(self) -> bool:
        """Whether there is learning in it."""
        return bool(self.learned or self.slices)


class Unified:
    """Keeps the deficit counters, the deadlines that have moved, and how long a preemptible pass
    may be."""

    traits = Traits(decodes_alike=True, records_in_parts=True, eviction=ByClass())

    def __init__(self, options: Options) -> None:
        self._options = options
        self._deadlines = Deadlines()
        self._observer = Observer(options.min_share, options.patience_s)
        self._ends = EndTables()
        self._learning_ranks = False  # whether learning is worth more than offline requests
        self._behind_s = 0.0  # what the one that is worth less has earned of the spare time
        self._served = False  # whether the last plan had the online requests
        self._served_s = -math.inf  # when the last such plan ended
        self._pass_s = _IDLE_S  # longest preemptible pass
        self._lost = False  # whether the last plan was preempted
        self._plan: _Plan | None = None  # the last plan, if it had learning

    def decide(self, view: View) -> Decision:
        """Online requests first, then the best of what fits beside them."""
        scene = self._observe(view)
        budget = self._budget(view, scene)
        ranked = self._rank(view, scene)
        plan = self._fill(view, scene, budget, ranked)
        return self._emit(view, scene, budget, plan)

    # ------------------------------------------------------------------ observe

    def _observe(self, view: View) -> Scene:
        """What waits and runs, and what came of the last plan."""
        self._settle(view)
        if self._served:
            self._served_s = view.now
        return self._observer.scene(view)

    # ------------------------------------------------------------------ budget

    def _budget(self, view: View, scene: Scene) -> _Budget:
        """The pass of the online requests, and the seconds that they can spare."""
        rest, busy = bool(scene.items or scene.offline or scene.waiting), self._observer.busy
        if not (rest or scene.queue):
            return _Budget(OnlinePass())
        memory = self._memory(view, scene) if scene.queue else None
        online = OnlinePass.of(view, scene.running, scene.queue, busy, scene.owed, memory)
        if not rest:
            return _Budget(online)
        self._deadlines.forget_ended(view)
        slack_s = online.due_s(view, self._deadlines) / margin(view) - online.seconds
        ceiling_s = min(self._options.ceiling_s, _WAIT_SHARE * self._deadlines.wait_s(view))
        if not online.work.tokens:
            return _Budget(online, min(slack_s, ceiling_s), 0.0 if scene.queue else _IDLE_S)
        slack_s -= min(self._deadlines.prompt_s(view), _MOST_KEPT * slack_s)
        pause_s = self._options.ceiling_s - (view.now - self._served_s)
        spare_s = min(slack_s, min(ceiling_s, pause_s) - online.seconds)
        # Slack that learning takes makes answers end later, beside the next prompts. The wait in
        # their queue grows with the load as 1 / (1 - busy)^2.
        alone_s = min(_ALONE_SHARE * (1.0 - busy) ** 2 * slack_s, pause_s)
        return _Budget(online, spare_s, 0.0 if scene.queue else alone_s)

    def _memory(self, view: View, scene: Scene) -> PeakMemory:
        """What online requests that wait may use: all else is preempted, but what is protected."""
        protected = [seq for seq in scene.kept if seq.scoring is not None]
        return PeakMemory(view, self._ends, scene.running, protected)

    # ------------------------------------------------------------------ rank

    def _rank(self, view: View, scene: Scene) -> list[_Ranked]:
        """Offline requests and learning, what is worth most per second first."""
        ranked: list[_Ranked] = []
        if scene.items:
            value = self._options.training_weight * scene.items[0].value(view.latency)
            ranked.append((value, [], 0, 0))
        # Those that run go before those that wait: these are worth so much only once they end.
        waiting = self._rank_waiting(view, scene) if scene.waiting else []
        best = waiting[0][0] if waiting else 0.0
        decodes = [seq for seq in scene.offline if seq.decoding]
        if decodes:
            value = offline_value(view, decodes[0], 0, 0.0)
            ranked.append((max(value, best), decodes, 0, 0))
        for seq in scene.offline:
            if not seq.decoding:
                value = offline_value(view, seq, seq.computed, 0.0)
                ranked.append((max(value, best), [seq], seq.computed, 0))
        ranked += waiting
        ranked.sort(key=lambda each: -each[0])
        if not scene.items or len(ranked) == 1:
            self._behind_s = 0.0
            return ranked
        if self._learning_ranks != (not ranked[0][1]):
            self._learning_ranks, self._behind_s = not ranked[0][1], 0.0
        if self._behind_s > 0.0:  # the other one's turn
            ranked.sort(key=lambda each: bool(each[1]) != self._learning_ranks)
        return ranked

    def _rank_waiting(self, view: View, scene: Scene) -> list[_Ranked]:
        """Waiting offline requests that are worth more than the blocks that others will read and
        that have to go for them.

        Beside other offline requests one begins only if it leaves the blocks that online requests
        will want (Echo 4.2, 5.3). So one always may start.
        """
        ranked: list[_Ranked] = []
        for seq in scene.waiting:
            start, length = start_of(view, seq), len(seq.tokens)
            missing = -(-(length - start) // view.kv.block_size)
            lost = view.kv.wanted_evictions(missing) if scene.offline else 0.0
            if (value := offline_value(view, seq, start, lost)) > 0.0:
                ranked.append((value, [seq], start, view.kv.new_blocks(seq, length)))
        ranked.sort(key=lambda each: -each[0])
        learning = view.running_in_order[len(view.serving) :]
        more = view.kv.online_demand_blocks - view.kv.held_blocks(WorkClass.ONLINE)  # that come
        running = [*scene.running, *scene.offline]
        memory = PeakMemory(view, self._ends, running, learning, max(0.0, more))
        fitting: list[_Ranked] = []
        for each in ranked:
            if len(fitting) == scene.slots or memory.exhausted:
                break
            if memory.try_count(each[1][0], needed=not (scene.offline or fitting)):
                fitting.append(each)
        return fitting

    # ------------------------------------------------------------------ fill

    def _fill(self, view: View, scene: Scene, budget: _Budget, ranked: list[_Ranked]) -> _Plan:
        """Grant time and place in the order of the ranks."""
        plan, online = _Plan(), budget.online
        if not ranked:
            return plan
        idle = not online.work.tokens
        apart = self._options.temporal_only and (not idle or len(ranked) > 1)
        owed = bool(scene.items) and self._observer.learning.starving
        if owed or not ranked[0][1]:
            self._try_alone(view, scene, budget, plan, apart=apart)
            if plan.learns:
                return plan
        ledger = self._ledger(view, scene, online)
        if owed and not apart:
            ledger.rows += online.joining_rows  # it goes before the waiting requests
            ledger.seconds += max(budget.spare_s, self._observer.learning.seconds)
            self._learn(ledger, scene.items[:1], plan, needed=True)
            ledger.rows -= online.joining_rows
            ledger.seconds -= max(0.0, self._observer.learning.seconds - budget.spare_s)
        else:
            ledger.seconds += budget.spare_s
        ledger.slots -= len(scene.queue)
        ledger.blocks -= sum([-(-len(seq.tokens) // view.kv.block_size) for seq in scene.queue])
        free = idle and not (scene.items or scene.queue)
        for _, sequences, start, blocks in ranked:
            needed, before_s = idle and not (plan.learns or plan.after), ledger.work_s
            if sequences and sequences[0].decoding:
                plan.after += ledger.decodes(sequences, needed=needed, timed=not free)
            elif sequences:
                plan.after += ledger.prompt(sequences[0], start, blocks, needed=needed)
            elif not apart:
                self._learn(ledger, scene.items[int(owed) :], plan, needed=needed)
            plan.offline_s += ledger.work_s - before_s if sequences else 0.0
        return plan

    def _try_alone(
        self, view: View, scene: Scene, budget: _Budget, plan: _Plan, *, apart: bool
    ) -> None:
        """Learning in an iteration of its own, if there is time for it; `apart`: in turns.

        Time that learning has earned is used beside the online requests, where nothing preempts it,
        and without any after a lost pass.
        """
        idle, owed = not budget.online.work.tokens, self._observer.learning.starving
        if apart and self._served:
            seconds = max(budget.spare_s, self._observer.learning.seconds if owed else 0.0)
            self._learn_alone(view, scene, plan, seconds, 0.0, needed=owed)
            plan.preemptible &= not owed
        elif not apart and not (owed and (self._lost or not idle)):
            beside_s = 0.0 if idle else budget.spare_s
            if idle or budget.alone_s >= _OVERHEADS * self._observer.overhead_s:
                self._learn_alone(view, scene, plan, budget.alone_s, beside_s, needed=idle)

    def _ledger(self, view: View, scene: Scene, online: OnlinePass) -> Ledger:
        running, kept = len(view.running_in_order), scene.kept
        free = view.kv.num_blocks - view.kv.blocks_of(kept) - len(kept) if kept else math.inf
        return Ledger(
            view.latency,
            view.kv.block_size,
            not running,
            online.left if online.work.tokens else view.budgets.max_batch_tokens,
            online.seconds,
            view.kv.available_blocks - running,
            view.budgets.max_sequences - running,
            view.recording_room,
            free,
            online.work.copy(),
            online.seconds,
        )

    def _learn_alone(
        self,
        view: View,
        scene: Scene,
        plan: _Plan,
        seconds: float,
        beside_s: float,
        *,
        needed: bool,
    ) -> None:
        """Learning without the online requests: slices, or else a preemptible pass. Beside them a
        pass costs less, so one alone has to be longer if a piece fits beside them (`beside_s`)."""
        if seconds <= 0.0 and not needed:
            return
        ledger = self._ledger(view, scene, OnlinePass())
        ledger.seconds, ledger.whole = seconds, True
        plan.slices += [s for item in scene.items for s in ledger.slices(item, needed=False)]
        plan.learned_s = seconds - ledger.seconds
        if not plan.slices:
            piece_s = scene.items[0].piece_s(view.latency, view.kv.block_size)
            pass_s = min(seconds, max(self._pass_s, piece_s))
            ledger.seconds = scene.items[0].whole_s(view, pass_s) if needed else pass_s
            if piece_s <= beside_s and ledger.seconds <= _MUCH_LONGER * beside_s:
                return
            self._learn(ledger, scene.items, plan, needed=needed)
            plan.pass_s = ledger.work_s
        plan.alone = plan.preemptible = plan.learns

    def _learn(
        self, ledger: Ledger, items: list[LearningItem], plan: _Plan, *, needed: bool
    ) -> None:
        """Learning in the pass of the ledger; with `needed` at least the smallest piece."""
        for item in items:
            left_s, first = ledger.left_s, needed and not plan.learns
            if left_s <= 0.0 and not first:
                break
            forwards = ledger.forwards(item, needed=first)
            plan.learned |= {each.seq_id for each in forwards}
            (plan.before if item.starving else plan.after).extend(forwards)
            plan.slices += ledger.slices(item, needed=needed and not plan.learns)
            plan.learned_s += left_s - ledger.left_s

    # ------------------------------------------------------------------ emit

    def _emit(self, view: View, scene: Scene, budget: _Budget, plan: _Plan) -> Decision:
        """The order of the candidates, and who may be preempted for them: learning first, then the
        latest arrival of the lowest class."""
        used = (plan.learned_s, plan.offline_s)
        first_s, second_s = used if self._learning_ranks else reversed(used)
        behind_s = self._behind_s + _SECOND_SHARE * first_s - second_s
        self._behind_s = min(1.0, max(-1.0, behind_s))
        joining = [] if plan.alone else budget.online.joining
        self._served = not plan.alone
        self._observer.first = joining[0] if joining else None
        self._plan = plan if plan.learns else None
        if plan.learns:
            plan.spent_s, plan.step = self._observer.learning.spend(plan.learned_s), last_step(view)
        apart = self._observer.starving_item or self._options.temporal_only
        self._observer.look_again(view.now, full=bool(scene.items) and not (plan.learns or apart))
        order = [] if plan.alone else [Candidate(s.seq_id, None, True) for s in scene.running]
        if order and scene.running[0] is self._observer.starving:  # it leaves each other one a row
            rows = max(1, view.budgets.max_batch_tokens - len(order) + 1)
            order[0] = Candidate(order[0].seq_id, rows, True)
        order += plan.before
        order += [Candidate(seq.seq_id, None, True) for seq in joining]
        order += plan.after
        kept = {seq.seq_id for seq in scene.kept} | {each.seq_id for each in plan.before}
        victims = [seq.seq_id for seq in reversed(view.running_in_order)]
        if kept:
            victims = [each for each in victims if each not in kept]
        return Decision.on_device(
            tuple(order),
            slices=tuple(plan.slices),
            victims=tuple(victims),
            preemptible=plan.preemptible,
        )

    def _settle(self, view: View) -> None:
        """Learn from the result of the last plan, if it had learning: give back what did not run,
        and adapt the length of a preemptible pass."""
        plan, last, self._plan, self._lost = self._plan, view.last_plan, None, False
        if plan is None:
            return
        ran = last is not None and last_step(view) != plan.step
        self._lost = ran and any(result.stopped for result in view.last_results)
        done = False
        if ran and last is not None and not self._lost:
            for lane in last.lanes:
                spans = any(span.seq_id in plan.learned for span in lane.spans)
                done |= spans or bool(lane.slices or lane.updates)
        if not done:
            self._observer.learning.give_back(plan.spent_s)
        if self._lost:
            self._pass_s = _AFTER_LOSS * plan.pass_s
        elif ran and plan.pass_s:
            self._pass_s = min(max(self._pass_s, _AFTER_END * plan.pass_s), _IDLE_S)
