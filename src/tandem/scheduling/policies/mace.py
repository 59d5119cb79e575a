"""MACE's hybrid scheduler, as its paper has it (section 4.1, 4.2; algorithm 1).

Prefills, decodes and fine-tuning are tasks of one queue with priorities that grow with age;
they are packed into bins of KV memory by best fit, the first bin is the iteration, and the rest
waits. A fine-tuning task is what is next of its step: its forwards, or all of its layers.
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
    """The paper's constants, for which it gives an order but no values, and its ablations.

    `pi_*` are base priorities, `delta_*` what a second of waiting adds, `gamma` weighs the loss of
    a step's samples. `lambda_memory` and `lambda_latency` weigh the two terms of the fit, each
    normalised: by the capacity, and by `budget_s`. An iteration stops taking tasks once its first
    bin is `tau_memory` full or `tau_tasks` were looked at. `bins=false` is MACE/Bin: first in,
    first out, inference and training apart, in batches of `fixed_inference` and `fixed_training`;
    with `apart=false` both share iterations: the hybrid in order of arrival of figure 13.
    `prefix=false` is MACE/Prefix: prompts are not ordered by what they share (run it without
    prefix caching).
    """

    pi_decode: float = 3.0
    pi_prefill: float = 2.0
    pi_ft: float = 1.0
    delta_decode: float = 0.01
    delta_prefill: float = 0.05
    delta_ft: float = 0.1
    gamma: float = 0.3
    lambda_memory: float = 1.0
    lambda_latency: float = 1.0
    tau_memory: float = 0.95
    tau_tasks: int = 256
    budget_s: float = 0.25
    bins: bool = True
    apart: bool = True
    fixed_inference: int = 50
    fixed_training: int = 2
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
    """Something to run: sequences to forward (at most one unless it fine-tunes), or layers.

    `decodes` says that it is one token of a request, `begun` that it runs already. `blocks` is the
    memory it takes beside what it holds, `seconds` what it would add to a pass (nan: not asked for
    yet), `recorded` the rows that it needs recording room for before it can start.
    """

    priority: float
    arrival_s: float
    order: int
    sequences: list[Sequence]
    blocks: int
    seconds: float = math.nan
    step: StepWork | None = None
    decodes: bool = False
    begun: bool = False
    recorded: int = 0


# What sorts a task, and of what it is made once it is looked at: -priority, arrival, order, place.
_Entry = tuple[float, float, int, int, Sequence | StepWork]


@dataclass(slots=True)
class Bin:
    """Tasks that run together."""

    free_blocks: int
    tasks: list[Task] = field(default_factory=list)
    _longest_s: float = 0.0  # of the first `_timed` tasks
    _timed: int = 0

    def add(self, task: Task) -> None:
        """Put a task in."""
        self.tasks.append(task)
        self.free_blocks -= task.blocks

    def longest_s(self, view: View) -> float:
        """What the longest of the tasks would add to a pass."""
        for task in self.tasks[self._timed :]:
            self._longest_s = max(self._longest_s, _seconds(view, task))
        self._timed = len(self.tasks)
        return self._longest_s


class Mace:
    """See the module; keeps no state."""

    traits = Traits()

    def __init__(self, options: Options) -> None:
        self._options = options

    def decide(self, view: View) -> Decision:
        """See the module."""
        tasks = (self._task(view, entry) for entry in self._entries(view))
        chosen = self._first_bin(view, tasks) if self._options.bins else self._fixed(view, tasks)
        return self._decision(view, chosen)

    # ------------------------------------------------------------------ tasks

    def _entries(self, view: View) -> list[_Entry]:
        """Everything that could run, the highest priority first. Of it, few become tasks."""
        options, now = self._options, view.now
        entries: list[_Entry] = []
        # The oldest prompt has the highest priority of all that wait, and only as many can start.
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
            elif seq.scoring.step_id is None:  # as fine-tuning whose loss is not known
                priority = options.pi_ft + options.delta_ft * (now - arrived)
            else:
                continue
            entries.append((-priority, arrived, seq.seq_id, len(entries), seq))
        # An update is held up while a score that has begun reads what it changes.
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
        """What is to be known of a task to pack it."""
        priority, arrival_s, order, _, source = entry
        if isinstance(source, StepWork):
            # Those that have begun first: they may hold what the others need.
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
        """Algorithm 1. A task that fits nowhere opens a bin, however large it is."""
        capacity, most_tasks = view.available_blocks, self._options.tau_tasks
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
        """The fragmentation that is left: f of section 4.2, both terms normalised."""
        memory = abs(into.free_blocks - task.blocks) / max(1, capacity)
        latency = abs(into.longest_s(view) - _seconds(view, task)) / self._options.budget_s
        return self._options.lambda_memory * memory + self._options.lambda_latency * latency

    def _fixed(self, view: View, tasks: Iterable[Task]) -> list[Task]:
        """Of each kind its fixed number, in order of arrival; MACE/Bin: of the oldest's kind."""
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
        """Run `chosen` in the order of their priority; decodes first, for the sake of rows.

        Everything else may be preempted for blocks, the latest of the least class first.
        """
        decodes: list[Task] = []
        others: list[Task] = []
        for task in chosen:
            (decodes if task.decodes else others).append(task)
        if self._options.prefix:
            others = _depth_first(others, view.block_size)
        order = [seq for task in (*decodes, *others) for seq in task.sequences]
        slices = [SliceCandidate(task.step.step_id) for task in others if task.step is not None]
        kept = {seq.seq_id for seq in order}
        running = [seq.seq_id for seq in reversed(view.running_in_order)]
        running.sort(key=kept.__contains__)  # stable
        return Decision.on_device(
            tuple([Candidate(seq.seq_id, None, seq.computed > 0) for seq in order]),
            slices=tuple(slices),
            victims=tuple(running),
        )


def _startable(view: View, tasks: Iterable[Task]) -> Iterator[Task]:
    """Leave out what admission would not start: beside others, each of which may need a block more,
    and without a slot.

    What has not begun after such a task is left out, too: the memory that it waits for is not
    theirs. Without this, old tasks that do not fit could fill the first bin and nothing would run.
    """
    running, free_slots = len(view.running), view.budgets.max_sequences - len(view.running)
    free_blocks, waits = view.available_blocks - running, False
    for task in tasks:
        if not task.begun:
            waits = waits or (running > 0 and (task.blocks > free_blocks or free_slots <= 0))
            if waits or task.recorded > view.recording_room:
                continue
            free_slots -= len(task.sequences)
        yield task


def _oldest(waiting: list[Sequence], most: int) -> list[Sequence]:
    """Those of all classes that came first; `waiting` is by class, then arrival."""
    online = num_online(waiting)
    classes = waiting[: min(online, most)], waiting[online : online + most]
    return list(islice(merge(*classes, key=_arrival), most))


def _arrival(seq: Sequence) -> tuple[float, int]:
    return seq.request.arrival_s, seq.seq_id


def _has_begun(step: StepWork) -> bool:
    """Whether something of it runs, or can run without memory."""
    running = [seq for seq in step.sequences.values() if seq.status is SequenceStatus.RUNNING]
    return bool(running or step.owed() or step.updatable)


def _unopened_rows(step: StepWork) -> int:
    """Rows of the next micro-batch to forward, unless it is open already."""
    waiting = next((batch for batch in step.micro_batches if not batch.scored), None)
    return 0 if waiting is None or waiting.opened else waiting.rows


def _missing_blocks(view: View, seq: Sequence) -> int:
    """Blocks that its remaining tokens need beside those it holds."""
    size = view.block_size
    return -(-len(seq.tokens) // size) - -(-seq.computed // size)


def _seconds(view: View, task: Task) -> float:
    """What a task would add to a pass. Counts only where it could go into several bins, which is
    rare, so it is not predicted before."""
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
    """Prompts that share a beginning one after the other: the order of a walk over their trie.

    A group goes where its first member was; within it, by tokens, so that each finds what the one
    before has computed.
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
