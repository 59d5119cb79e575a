"""The sequences that the scheduler knows, by status and in order of arrival.

Invariant: a sequence is in exactly one of `waiting`, `learning`, `running` and `forks`; `all` has
every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.sequence import Sequence, SequenceStatus
from tandem.core.slo import DEFAULT_SLO, Slo, WorkClass
from tandem.scheduling.ordered import OrderedSequences
from tandem.scheduling.starts import BEGUN, StartTimes

# Each request with a longer TTFT objective relaxes the tracked strictest one by this factor.
_FORGET = 1.1


@dataclass(slots=True)
class SchedulerState:
    """The three collections `waiting`, `learning` and `running` iterate oldest entry first. A
    preempted sequence is a new entry, so policies order by arrival instead."""

    default_slo: Slo = DEFAULT_SLO  # objective of requests that bring none
    all: dict[int, Sequence] = field(default_factory=dict)
    waiting: OrderedSequences = field(default_factory=OrderedSequences)
    learning: OrderedSequences = field(default_factory=OrderedSequences)  # waiting, to be scored
    running: OrderedSequences = field(default_factory=OrderedSequences)
    # Later choices of an `n > 1` request, by the `seq_id` of choice 0. They wait until its prompt
    # is computed and then share it.
    forks: dict[int, list[Sequence]] = field(default_factory=dict)
    waiting_tokens: int = 0  # tokens of all `waiting` sequences
    starts: StartTimes = field(default_factory=StartTimes)  # online ones of `waiting`
    ttft_slo_s: float = 0.0  # strictest TTFT objective of recent online requests
    moves: int = 0  # starts and preemptions so far

    def __post_init__(self) -> None:
        self.ttft_slo_s = self.default_slo.ttft_s

    @property
    def num_waiting(self) -> int:
        """Sequences of requests that do not run yet, with later choices of `n > 1` requests."""
        return len(self.all) - len(self.running) - len(self.learning)

    @property
    def num_running(self) -> int:
        """Sequences of requests that hold blocks. Scored sequences are not counted."""
        return self.running.num_requests

    @property
    def of_one_class(self) -> bool:
        """Whether all sequences belong to requests of one class."""
        orders = (self.running.in_order, self.waiting.in_order, self.learning.in_order)
        ends = [seq for order in orders for seq in (*order[:1], *order[-1:])]
        alike = len({seq.request.work_class for seq in ends}) <= 1
        return alike and not any(seq.scoring for seq in ends)

    def add(self, seq: Sequence) -> None:
        """Take a new sequence, which waits."""
        self.all[seq.seq_id] = seq
        request = seq.request
        if request.work_class is WorkClass.ONLINE:
            own_s = (request.slo or self.default_slo).ttft_s
            self.ttft_slo_s = min(own_s, _FORGET * self.ttft_slo_s)
        self._wait(seq)

    def add_fork(self, parent: Sequence, child: Sequence) -> None:
        """Take a later choice, which waits until `parent` has computed the shared prompt."""
        self.all[child.seq_id] = child
        self.forks.setdefault(parent.seq_id, []).append(child)

    def take_forks(self, parent: Sequence) -> list[Sequence]:
        """Remove the forks of `parent`; the caller then makes each of them run or wait."""
        return self.forks.pop(parent.seq_id, [])

    def run_fork(self, child: Sequence) -> None:
        """A fork shares its parent's blocks, so it runs."""
        child.status = SequenceStatus.RUNNING
        self.running.add(child)

    def wait_fork(self, child: Sequence) -> None:
        """A fork needs blocks of its own, so it waits."""
        self._wait(child)

    def grow(self, seq: Sequence) -> None:
        """A waiting sequence got a token. It is a fork that needs blocks of its own."""
        self.waiting_tokens += 1
        if seq.request.work_class is WorkClass.ONLINE:
            self.starts.discard(seq)
            self.starts.add(seq, BEGUN)

    def run(self, seq: Sequence) -> None:
        """From waiting to running."""
        self._stop_waiting(seq)
        self.moves += 1
        seq.status = SequenceStatus.RUNNING
        self.running.add(seq)

    def wait(self, seq: Sequence) -> None:
        """From running back to waiting."""
        self.running.remove(seq)
        self.moves += 1
        self._wait(seq)

    def remove(self, seq: Sequence) -> None:
        """A sequence has ended. Its forks, if any, were taken before."""
        assert seq.seq_id not in self.forks
        siblings = next((f for f in self.forks.values() if seq in f), None)
        if siblings is not None:
            siblings.remove(seq)
        elif seq.seq_id in self.waiting or seq.seq_id in self.learning:
            self._stop_waiting(seq)
        elif seq.seq_id in self.running:  # else a fork that was taken and never ran
            self.running.remove(seq)
        del self.all[seq.seq_id]
        seq.status = SequenceStatus.FINISHED

    def _wait(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        if seq.scoring is not None:
            self.learning.add(seq)
            return
        self.waiting.add(seq)
        if seq.request.work_class is WorkClass.ONLINE:
            slo, begun = seq.request.slo or self.default_slo, seq.output_tokens > 0
            self.starts.add(seq, BEGUN if begun else slo.start_by(seq.request.arrival_s))
        self.waiting_tokens += len(seq.tokens)

    def _stop_waiting(self, seq: Sequence) -> None:
        if seq.scoring is not None:
            self.learning.remove(seq)
            return
        self.waiting.remove(seq)
        self.starts.discard(seq)
        self.waiting_tokens -= len(seq.tokens)


def moment_of(state: SchedulerState) -> tuple[int, int, int]:
    """Equal at two moments if nothing came, ended, started or was preempted in between."""
    return next(reversed(state.all), 0), len(state.all), state.moves


def class_of(seq: Sequence) -> WorkClass:
    """The class of a sequence. Scored sequences belong to learning."""
    return WorkClass.LEARNING if seq.scoring is not None else seq.request.work_class
