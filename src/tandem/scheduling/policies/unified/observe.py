"""What an iteration could run, and which of it is starving.

Keeps the deficit counter of each class. Reads the view, changes nothing. Invariant: at most one
offline request and one step or score are starving, each until it has ended.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from tandem.core.sequence import Sequence, SequenceStatus
from tandem.scheduling.policies.unified.deficit import Deficit
from tandem.scheduling.policies.unified.online import (
    Load,
    last_step,
    span_s,
    start_of,
    starting_order,
)
from tandem.scheduling.policies.unified.rest import (
    LearningItem,
    is_offline,
    learning_items,
    offline_waiting,
    oldest_offline,
)
from tandem.scheduling.queues import is_waiting, num_online
from tandem.scheduling.view import View

# Most seconds of waiting after which learning is starving while its cost may be predicted far too
# high: until it is known, and after so many seconds without a place.
_TRIAL_S = 1.0
_FULL_S = 5.0
# Learning that found no place beside requests is not considered again for as long as it has had
# none, at most so many seconds, since finding that out takes time.
_AGAIN_S = 0.05
# The loop's time of an iteration is the shortest of the last so many.
_RECENT = 16
# So many offline requests begin by their value; then the one that came first begins.
_MOST_BEFORE = 100
# Share of the sequence slots that offline requests leave to learning.
_KEPT_SHARE = 0.125


@dataclass(slots=True)
class Scene:
    """What an iteration could run."""

    running: list[Sequence]  # online requests; a starving offline one is first
    queue: list[Sequence]  # those that wait, in the order of their starts
    owed: Sequence | None = None  # the one of the queue that starts whatever it costs
    offline: list[Sequence] = field(default_factory=list)  # other offline requests that run
    waiting: list[Sequence] = field(default_factory=list)  # other offline requests that may start
    slots: int = 0  # for these
    items: list[LearningItem] = field(default_factory=list)
    kept: list[Sequence] = field(default_factory=list)  # starving: protected from preemption


class Observer:
    """Looks at what there is, once per decision. `first` is the first request that the last plan
    was to start."""

    def __init__(self, min_share: float, patience_s: float) -> None:
        """Both are options of the policy."""
        self._patience_s = patience_s
        self._load = Load()
        # The counters of the classes. That of online requests is for the one that is late for the
        # longest time, that of offline requests for the oldest one.
        self._online = Deficit(min_share, patience_s)
        self._offline = Deficit(min_share, patience_s)
        self.learning = Deficit(min_share, patience_s)
        self._late: tuple[Sequence, float] | None = None  # that request, and seconds of its prompt
        self._oldest: tuple[Sequence | None, int] = (None, 0)  # that request, and how far it came
        # What is starving stays so until it has ended: a request, and a step or a score.
        self.starving: Sequence | None = None
        self.starving_item: object = None
        self.first: Sequence | None = None
        self._offered: list[Sequence] = []  # offline requests that the last plan could start
        self._begun = 0  # those that began since the one that came first had its turn
        self._ended: tuple[float, int | None] = (0.0, None)  # the last decision: its time and step
        self._beside_s: deque[float] = deque((0.0,), maxlen=_RECENT)
        self._learns = False  # whether there was learning at the last decision
        self._had_place_s = 0.0  # when learning last had a place, or came
        self._again_s = -math.inf  # when it is considered again

    @property
    def busy(self) -> float:
        """The busy share of the device."""
        return self._load.busy

    @property
    def overhead_s(self) -> float:
        """Seconds of an iteration beside its work: to decide, to start, to collect, to apply."""
        return min(self._beside_s)

    def scene(self, view: View) -> Scene:
        """What waits and runs, and which of it is starving. Called once per decision."""
        self._load.note(view)
        self._note_overhead(view)
        running, serving, waits = view.running_in_order, view.serving, view.waiting_in_order
        learns = bool(view.learning or view.steps or (running and running[-1].scoring is not None))
        batch = any(order and is_offline(order[-1]) for order in (serving, waits))
        online = num_online(serving) if batch else len(serving)
        self._count_late(view)
        count = max(0, view.budgets.max_sequences - online) + 1
        scene = Scene(serving, starting_order(view, count, owed=self._online.starving))
        if self._online.starving and self._late is not None:
            scene.owed = self._late[0]
        if batch:
            self._set_apart(view, scene, online, learns=learns)
        else:
            self._offline.forget()
            self.starving = None
        busy = bool(scene.running or scene.queue)
        if not self._learns:
            self._had_place_s = view.now
        self._learns = learns
        if not learns:
            self.learning.forget()
            self._again_s, self.starving_item = -math.inf, None
        elif batch or not busy or view.now >= self._again_s:
            self._add_learning(view, scene, running[len(serving) :])
        return scene

    def _note_overhead(self, view: View) -> None:
        step = last_step(view)
        results = view.last_results
        # After a plan whose slices trail, the loop also waits for these.
        trails = any(math.isnan(each.elapsed_s) for result in results for each in result.slices)
        if step is not None and step != self._ended[1] and results and not trails:
            took_s = max([each.elapsed_s for each in view.last_results])
            ended_s = view.now - view.trailing_s
            self._beside_s.append(max(0.0, ended_s - self._ended[0] - took_s))
        self._ended = (view.now, step)

    def look_again(self, now: float, *, full: bool) -> None:
        """Note when to consider learning again; `full`: it was considered and had no place."""
        if full:
            self._again_s = now + min(_AGAIN_S, now - self._had_place_s)
        elif now >= self._again_s:
            self._had_place_s = now

    def _count_late(self, view: View) -> None:
        """The counter of online requests. It earns while a late one waits."""
        if self._late is not None and self._online.starving and not is_waiting(self._late[0]):
            self._online.spend(self._late[1])
        self._late = None
        if not view.starts.any_late(view.now):
            self._online.forget()
            return
        first = view.starts.late(view.now, 1)[0]
        start = start_of(view, first)
        self._late = (first, span_s(view, start, len(first.tokens) - start))
        self._online.patience_s = view.default_slo.ttft_s
        self._online.earn(view.now)

    def _set_apart(self, view: View, scene: Scene, online: int, *, learns: bool) -> None:
        """Set the offline requests apart. A starving one counts as online until it has ended."""
        scene.running, scene.offline = scene.running[:online], scene.running[online:]
        scene.queue = [seq for seq in scene.queue if not is_offline(seq)]
        starving = self._count_oldest(view, free=not (scene.running or scene.queue or learns))
        if starving is not None and is_waiting(starving):
            begun = sum([seq.output_tokens > 0 for seq in scene.queue])  # these are first
            scene.queue.insert(begun, starving)
        elif starving is not None:
            scene.offline.remove(starving)
            scene.running.insert(0, starving)
            scene.kept.append(starving)
        most = view.budgets.max_sequences
        kept = min(max(1, int(_KEPT_SHARE * most)), most - 1) if learns else 0
        slots = max(0, most - len(view.running) - len(scene.queue) - kept)
        self._count_begun()
        if slots:
            found = offline_waiting(view, first=self._begun >= _MOST_BEFORE)
            scene.waiting = [seq for seq in found if seq is not starving]
        scene.slots = slots
        self._offered = scene.waiting

    def _count_begun(self) -> None:
        """Count the offline requests that began before the one that came first."""
        begun = [seq for seq in self._offered if not is_waiting(seq)]
        first_had_turn = self._begun >= _MOST_BEFORE and bool(begun)
        self._begun = 0 if first_had_turn else self._begun + len(begun)

    def _count_oldest(self, view: View, *, free: bool) -> Sequence | None:
        """The counter of offline requests, and the starving one. It earns while there are some, and
        spends what brings the oldest one further than it ever was; nothing while all of the time is
        `free`."""
        oldest, (before, reached) = oldest_offline(view), self._oldest
        reached = reached if oldest is before else oldest.computed
        self._oldest = (oldest, max(reached, oldest.computed))
        if free:
            self._offline.forget()
        else:
            self._offline.earn(view.now)
            if oldest.computed > reached:
                self._offline.spend(span_s(view, reached, oldest.computed - reached))
        if self.starving is None or self.starving.status is SequenceStatus.FINISHED:
            self.starving = oldest if self._offline.starving and not free else None
        return self.starving

    def _add_learning(self, view: View, scene: Scene, scored: list[Sequence]) -> None:
        """Learning work in order. The first is starving once learning has waited for its patience,
        and until it has ended."""
        scene.items = items = learning_items(view, scored, self._patience_s)
        if not items:
            self.learning.forget()
            return
        full = view.now - self._had_place_s > _FULL_S
        trial = (view.latency.guessed or full) and not scene.queue
        self.learning.patience_s = min(self._patience_s, _TRIAL_S if trial else math.inf)
        self.learning.earn(view.now)
        places = [n for n, item in enumerate(items) if item.key is self.starving_item]
        self.starving_item = None
        if places or self.learning.starving:
            item = items.pop(places[0] if places else 0)
            items.insert(0, item)
            item.starving, self.starving_item = True, item.key
            # Sequences without computed tokens lose nothing by a preemption.
            scene.kept += [seq for seq in item.sequences if seq.computed]
            # While its blocks keep a request from starting, it goes on as if none waited.
            if scene.kept and scene.queue and scene.queue[0] is self.first:
                scene.queue = []
