"""MACE's hybrid scheduler, as its paper describes it (section 4.1, 4.2; algorithm 1).

Prefills, decodes and fine-tuning are tasks in one queue. Their priorities grow with age. Tasks are
packed into bins of KV memory by best fit. The first bin is the iteration; the other tasks wait. A
fine-tuning task is the next work of its step: its forwards, or all its layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from itertools import chain, islice

from msgspec import Struct

from tandem.core.decision import Candidate, Decision, SliceCandidate
from tandem.core.sequence import Sequence, SequenceStatus
from tandem.estimators.work import PassWork
from tandem.scheduling.queues import is_lone_score, is_waiting, num_online, startable_scores
from tandem.scheduling.training import StepWork
from tandem.scheduling.view import Policy, Traits, View


@dataclass(frozen=True, slots=True)
class Options:
    """The paper's constants, for which it gives an order but no values, and its ablations."""

    pi_decode: float = 3.0  # base priorities
    pi_prefill: float = 2.0
    pi_ft: float = 1.0
    delta_decode: float = 0.01  # priority gained per second of waiting
    delta_prefill: float = 0.05
    delta_ft: float = 0.1
    gamma: float = 0.3  # weight of the loss of a step's samples
    lambda_memory: float = 1.0  # weight of the memory term of the fit, normalised by the capacity
    lambda_latency: float = 1.0  # weight of its latency term, normalised by `budget_s`
    tau_memory: float = 0.95  # packing ends once this share of the first bin is full
    tau_tasks: int = 256  # or once this many tasks were considered
    budget_s: float = 0.25  # seconds
    # False: MACE/Bin. First in, first out, in batches of `fixed_inference` and `fixed_training`.
    bins: bool = True
    # False, with `bins=false`: inference and training share iterations (figure 13, the hybrid in
    # order of arrival).
    apart: bool = True
    fixed_inference: int = 50
    fixed_training: int = 2
    # False: MACE/Prefix. Prompts are not ordered by shared prefixes; run it without prefix caching.
    prefix: bool = True

    def __post_init__(self) -> None:
        if not (self.pi_decode > self.pi_prefill > self.pi_ft):
            raise ValueError("the paper demands pi_decode > pi_prefill > pi_ft")
        if not (self.delta_ft > self.delta_prefill > self.delta_decode):
            raise ValueError("the paper demands delta_ft > delta_prefill > delta_decode")
        if self.budget_s <= 0.0 or not 0.0 < self.tau_memory <= 1.0 or self.tau_tasks < 1:
            raise ValueError("budget_s must be above 0, tau_memory a share, tau_tasks at least 1")


def create(options: Options = Options()) -> Policy:
    """The policy of this file."""
    return Mace(options)


class Task(Struct, gc=False):
    """Something to run: sequences to forward, or layers to go back through."""

    priority: float
    arrival_s: float
    order: int  # breaks ties
    sequences: list[Sequence]  # to forward; at most one unless it fine-tunes
    blocks: int  # KV blocks that it needs beside those it holds
    seconds: float = math.nan  # what it would add to a pass; nan: not predicted yet
    step: StepWork | None = None  # of a fine-tuning task
    decodes: bool = False  # whether it is one token of a request
    begun: bool = False  # whether it runs already
    recorded: int = 0  # recording rows that it needs before it can start


# What sorts a task, and what it is made from: -priority, arrival, order, index, source.
_Entry = tuple[float, float, int, int, Sequence | StepWork]


@dataclass(slots=True)
class Bin:
    """Tasks that run together."""

    free_blocks: int
    tasks: list[Task] = field(default_factory=list)
    _longest_s: float = 0.0  # of the first `_timed` tasks
    _timed: int = 0

    def add(self, task: Task) -> None:
        """Add a task."""
        self.tasks.append(task)
        self.free_blocks -= task.blocks

    def longest_s(self, view: View) -> float:
        """Seconds that the longest of its tasks would add to a pass."""
        for task in self.tasks[self._timed :]:
            self._longest_s = max(self._longest_s, _seconds(view, task))
        self._timed = len(self.tasks)
        return self._longest_s


class Mace:
    """Algorithm 1, or an ablation of it. Keeps no state."""

    traits = Traits()

    def __init__(self, options: Options) -> None:
        self._options = options

    def decide(self, view: View) -> Decision:
        """Rank all tasks, choose those of this iteration, order them."""
        tasks = (self._task(view, entry) for entry in self._entries(view))
        chosen = self._first_bin(view, tasks) if self._options.bins else self._fixed(view, tasks)
        return self._decision(view, chosen)

    # ------------------------------------------------------------------ tasks

    def _entries(self, view: View) -> list[_Entry]:
        """Everything that could run, the highest priority first. Few entries become tasks."""
        options, now = self._options, view.now
        entries: list[_Entry] = []
        # Of the waiting prompts the oldest has the highest priority, and at most `slots` can start.
        slots = view.budgets.max_sequences - len(view.running)
        waiting: list[Sequence] = []
        scores: Iterable[Sequence] = ()
        if slots > 0:  # else nothing can start
            waiting = _oldest(view.waiting_in_order, min(slots + 1, options.tau_tasks))
            scores = islice(startable_scores(view), options.tau_tasks)
        for seq in chain(view.running, waiting, scores):
            arrived = seq.request.arrival_s
            if seq.scoring is None:
                if seq.computed and len(seq.tokens) - seq.computed == 1:
                    priority = options.pi_decode + options.delta_decode * (now - arrived)
                else:
                    priority = options.pi_prefill + options.delta_prefill * (now - arrived)
            elif seq.scoring.step_id is None:  # like fine-tuning of unknown loss
                priority = options.pi_ft + options.delta_ft * (now - arrived)
            else:
                continue
            entries.append((-priority, arrived, seq.seq_id, len(entries), seq))
        # An update waits while a running score reads the parameters that it changes.
        read = {seq.scoring.trainer for seq in view.running if seq.scoring and is_lone_score(seq)}
        for step in view.steps:
            if step.updatable and step.trainer in read:
                continue
            if slots <= 0 and not _has_begun(step):
                continue
            urgency = options.gamma * step.urgency
            priority = options.pi_ft + options.delta_ft * (now - step.arrival_s) + urgency
            place = len(entries)
            entries.append((-priority, step.arrival_s, place, place, step))
        entries.sort()
        return entries

    def _task(self, view: View, entry: _Entry) -> Task:
        """The task of an entry, with what packing needs to know about it."""
        priority, arrival_s, order, _, source = entry
        if isinstance(source, StepWork):
            # Running sequences first: they may hold blocks that the others need.
            sequences = sorted(source.sequences.values(), key=is_waiting)
            blocks = sum([_missing_blocks(view, seq) for seq in sequences])
            task = Task(-priority, arrival_s, order, sequences, blocks, step=source)
            task.begun = _has_begun(source)
            task.recorded = _unopened_rows(source)
            return task
        blocks, decodes = _missing_blocks(view, source), source.decoding
        begun = source.status is SequenceStatus.RUNNING
        return Task(-priority, arrival_s, order, [source], blocks, decodes=decodes, begun=begun)

    # ------------------------------------------------------------------ packing

    def _first_bin(self, view: View, tasks: Iterable[Task]) -> list[Task]:
        """Algorithm 1. A task that fits into no bin opens a new one, however large it is."""
        capacity, most_tasks = view.kv.available_blocks, self._options.tau_tasks
        most_blocks = self._options.tau_memory * max(1, capacity)
        bins: list[Bin] = []
        for count, task in enumerate(_startable(view, tasks)):
            if bins and (capacity - bins[0].free_blocks >= most_blocks or count >= most_tasks):
                break
            fitting = [each for each in bins if each.free_blocks >= task.blocks]
            if len(fitting) == 1:
                best = fitting[0]
            elif fitting:
                best = min(fitting, key=partial(self._score_of, view, task, capacity))
            else:
                best = Bin(capacity)
                bins.append(best)
            best.add(task)
        return bins[0].tasks if bins else []

    def _score_of(self, view: View, task: Task, capacity: int, into: Bin) -> float:
        """The fragmentation that remains: f of section 4.2, both terms normalised."""
        memory = abs(into.free_blocks - task.blocks) / max(1, capacity)
        latency = abs(into.longest_s(view) - _seconds(view, task)) / self._options.budget_s
        return self._options.lambda_memory * memory + self._options.lambda_latency * latency

    def _fixed(self, view: View, tasks: Iterable[Task]) -> list[Task]:
        """The fixed number of tasks of each kind, in order of arrival. MACE/Bin takes only the kind
        of the oldest task."""
        by_arrival = sorted(tasks, key=lambda task: (task.arrival_s, task.order))
        oldest_first = list(_startable(view, by_arrival))
        if not oldest_first:
            return []
        room = {True: self._options.fixed_training, False: self._options.fixed_inference}
        if self._options.apart:
            room[oldest_first[0].step is None] = 0
        chosen: list[Task] = []
        for task in oldest_first:
            trains = task.step is not None
            if room[trains] > 0:
                room[trains] -= 1
                chosen.append(task)
        return chosen

    # ------------------------------------------------------------------ decision

    def _decision(self, view: View, chosen: list[Task]) -> Decision:
        """Run `chosen` by priority, but decodes first, so that each gets its row.

        All other sequences may be preempted for blocks, the latest arrival of the lowest class
        first.
        """
        decodes: list[Task] = []
        others: list[Task] = []
        for task in chosen:
            (decodes if task.decodes else others).append(task)
        if self._options.prefix:
            others = _depth_first(others, view.kv.block_size)
        order = [seq for task in (*decodes, *others) for seq in task.sequences]
        slices = [SliceCandidate(task.step.step_id) for task in others if task.step is not None]
        kept = {seq.seq_id for seq in order}
        running = [seq.seq_id for seq in reversed(view.running_in_order)]
        running.sort(key=kept.__contains__)  # stable: sequences that were not chosen come first
        return Decision.on_device(
            tuple([Candidate(seq.seq_id, None, seq.computed > 0) for seq in order]),
            slices=tuple(slices),
            victims=tuple(running),
        )


def _startable(view: View, tasks: Iterable[Task]) -> Iterator[Task]:
    """Leave out tasks that admission would not start: those without a slot, and those without
    blocks when each running sequence takes one more.

    Tasks after such a task that have not begun are left out too, since the free memory is reserved
    for it. Otherwise old tasks that do not fit could fill the first bin and nothing would run.
    """
    running, free_slots = len(view.running), view.budgets.max_sequences - len(view.running)
    free_blocks, waits = view.kv.available_blocks - running, False
    for task in tasks:
        if not task.begun:
            waits = waits or (running > 0 and (task.blocks > free_blocks or free_slots <= 0))
            if waits or task.recorded > view.recording_room:
                continue
            free_slots -= len(task.sequences)
        yield task


def _oldest(waiting: list[Sequence], most: int) -> list[Sequence]:
    """Up to `most` sequences of all classes, oldest first. `waiting` is by class, then arrival."""
    online = num_online(waiting)
    classes = waiting[: min(online, most)], waiting[online : online + most]
    return list(islice(merge(*classes, key=_arrival), most))


def _arrival(seq: Sequence) -> tuple[float, int]:
    return seq.request.arrival_s, seq.seq_id


def _has_begun(step: StepWork) -> bool:
    """Whether a part of it runs, or can run without memory."""
    running = [seq for seq in step.sequences.values() if seq.status is SequenceStatus.RUNNING]
    return bool(running or step.owed() or step.updatable)


def _unopened_rows(step: StepWork) -> int:
    """Rows of the next micro-batch to forward; 0 if it is open already."""
    waiting = next((batch for batch in step.micro_batches if not batch.scored), None)
    return 0 if waiting is None or waiting.opened else waiting.rows


def _missing_blocks(view: View, seq: Sequence) -> int:
    """Blocks that its remaining tokens need beside those it holds."""
    size = view.kv.block_size
    return -(-len(seq.tokens) // size) - -(-seq.computed // size)


def _seconds(view: View, task: Task) -> float:
    """What a task would add to a pass. Only a task that fits several bins needs it, which is
    rare."""
    if math.isnan(task.seconds):
        task.seconds = _predict(view, task)
    return task.seconds


def _predict(view: View, task: Task) -> float:
    latency, step = view.latency, task.step
    if task.decodes:
        return latency.added_decode_s(len(task.sequences[0].tokens))
    work = PassWork()
    for seq in task.sequences:
        rows = seq.remaining
        if step is None and seq.scoring is None:
            work.span(seq.computed, rows, draws=1)
        else:
            work.span(seq.computed, rows, scored=rows, recorded=rows if step is not None else 0)
    seconds = latency.added_s(work) if work.rows else 0.0
    if step is None:
        return seconds
    seconds += sum([latency.slice_s(batch.backward, batch.layers_left) for batch in step.owed()])
    return seconds + (latency.update_s() if step.updatable else 0.0)


def _depth_first(tasks: list[Task], block_size: int) -> list[Task]:
    """Order prompts with a common beginning one after the other, like a walk over their trie.

    A group takes the place of its first member. Within a group the order is by tokens, so each
    prompt finds what the previous one computed.
    """
    groups: dict[tuple[int, ...], list[Task]] = {}
    for task in tasks:
        tokens = task.sequences[0].tokens[:block_size] if task.sequences else []
        key = tuple(tokens) if task.step is None else (-1, task.order)
        groups.setdefault(key, []).append(task)
    ordered: list[Task] = []
    for group in groups.values():
        if len(group) > 1:
            group.sort(key=lambda task: (task.sequences[0].tokens, task.arrival_s, task.order))
        ordered += group
    return ordered
