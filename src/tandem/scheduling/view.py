"""What a policy sees, and the protocol that it implements.

The view is read-only by contract: policies must not change sequences. It is valid during one call
of `decide`. Invariant: nothing reachable from it pins blocks or changes state.
"""

from __future__ import annotations

from collections.abc import Iterable, ValuesView
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tandem.core.decision import Decision
from tandem.core.plan import StepPlan, StepResult
from tandem.core.sequence import Sequence
from tandem.core.slo import Slo, WorkClass
from tandem.estimators.latency import LatencyModel
from tandem.estimators.memory import DemandWindow
from tandem.kv.cache import KVCache
from tandem.kv.eviction import IdleBlock
from tandem.scheduling.learning import Learning
from tandem.scheduling.starts import StartTimes
from tandem.scheduling.state import SchedulerState
from tandem.scheduling.training import StepWork


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of one iteration: sequences (spans) and tokens (rows of the forward pass)."""

    max_sequences: int
    max_batch_tokens: int


@dataclass(frozen=True, slots=True)
class View:
    """A policy's window on the scheduler. Times in seconds on the engine's clock.

    `latency` predicts what work costs on the first of `lanes`, the device. Sequences with `scoring`
    belong to learning: those of training steps (`scoring.step_id`) and scores that were asked for
    alone.
    """

    now: float
    budgets: Budgets
    last_plan: StepPlan | None
    last_results: tuple[StepResult, ...]
    latency: LatencyModel
    lanes: tuple[str, ...]
    _state: SchedulerState
    _cache: KVCache
    _learning: Learning
    _demand: DemandWindow

    @property
    def waiting(self) -> ValuesView[Sequence]:
        """Sequences of requests without blocks, oldest first (preempted ones at the end)."""
        return self._state.waiting.values()

    @property
    def learning(self) -> ValuesView[Sequence]:
        """Sequences of steps and scores without blocks, oldest first (preempted ones at the end).

        One is here only if its step is the trainer's first. It does not start, and lets later
        candidates go ahead, while there is no room for its recording.
        """
        return self._state.learning.values()

    @property
    def running(self) -> ValuesView[Sequence]:
        """Sequences that hold blocks, learning's too, in the order in which they were admitted."""
        return self._state.running.values()

    @property
    def waiting_in_order(self) -> list[Sequence]:
        """`waiting` by class and arrival: the scheduler's own list, not to be changed."""
        return self._state.waiting.in_order

    @property
    def starts(self) -> StartTimes:
        """Online sequences of `waiting` by when they must start to meet their objective: the
        scheduler's own, not to be changed."""
        return self._state.starts

    @property
    def learning_in_order(self) -> list[Sequence]:
        """`learning` by arrival: the scheduler's own list, not to be changed."""
        return self._state.learning.in_order

    @property
    def running_in_order(self) -> list[Sequence]:
        """`running` by class and arrival: the scheduler's own list, not to be changed."""
        return self._state.running.in_order

    @property
    def serving(self) -> list[Sequence]:
        """The requests of `running`, by class and arrival."""
        return self._state.running.requests

    @property
    def steps(self) -> list[StepWork]:
        """The training step of each trainer that may run now, oldest first."""
        return self._learning.heads

    @property
    def scores(self) -> ValuesView[Sequence]:
        """Scores that were asked for alone, oldest first, waiting and running."""
        return self._learning.scores.sequences

    @property
    def learning_starts(self) -> int:
        """How many times a sequence of learning has started, since the beginning."""
        return self._state.learning_starts

    @property
    def queued_steps(self) -> list[str]:
        """Ids of all training steps that have not ended, oldest first."""
        return self._learning.queued

    @property
    def recording_room(self) -> int:
        """Rows that can be recorded beside the open micro-batches."""
        return self._learning.recording_room

    @property
    def default_slo(self) -> Slo:
        """The objective of requests that bring none."""
        return self._state.default_slo

    def slo(self, seq: Sequence) -> Slo:
        """The objective of a sequence: its request's, else the server's."""
        return seq.request.slo or self.default_slo

    @property
    def block_size(self) -> int:
        """Tokens a KV block."""
        return self._cache.block_size

    @property
    def num_blocks(self) -> int:
        """All KV blocks."""
        return self._cache.num_blocks

    @property
    def available_blocks(self) -> int:
        """KV blocks to be had without preempting anybody."""
        return self._cache.available_blocks

    def held_blocks(self, work_class: WorkClass) -> int:
        """KV blocks that the running sequences of a class hold (a shared one for each)."""
        return self._cache.held_by([seq for seq in self.running if class_of(seq) is work_class])

    @property
    def online_demand_blocks(self) -> float:
        """KV blocks to be left to online requests: the larger of what they hold now and of mu + 2
        sigma of what they held in the last hour (Echo 5.3), counted as by `held_blocks`."""
        return max(float(self.held_blocks(WorkClass.ONLINE)), self._demand.demand)

    def blocks_of(self, sequences: Iterable[Sequence]) -> int:
        """KV blocks that these running sequences hold (a shared one for each)."""
        return self._cache.held_by(sequences)

    def idle_blocks(self) -> list[IdleBlock]:
        """Cached blocks that nobody holds, with their future readers; costs O(blocks)."""
        return self._cache.idle_blocks()

    def match(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence whose KV is cached now. Pins nothing."""
        return self._cache.match(seq)


def class_of(seq: Sequence) -> WorkClass:
    """Which class a sequence belongs to; what is scored is learning's."""
    return WorkClass.LEARNING if seq.scoring is not None else seq.request.work_class


@dataclass(frozen=True, slots=True)
class Traits:
    """What a policy says of itself.

    `decodes_alike` promises that with nothing but decodes of one class it runs them all on the
    whole device, whatever the time, evicts in the cache's own order, and later decides the same
    whether it was asked at each of them or only at the first, so that simulations may leap
    (`Leaper`). With `records_in_parts`, of use where decisions give way, what is recorded and
    differentiated together is so small that requests can wait for a layer of it. `trains`: training
    steps get their turn at some time. `heeds_priority`: requests are ordered by their `priority`.
    """

    decodes_alike: bool = False
    records_in_parts: bool = False
    trains: bool = True
    heeds_priority: bool = False


@runtime_checkable
class Policy(Protocol):
    """Decides once an iteration.

    Called by the scheduler whenever something waits or runs. Must be deterministic in the view,
    must not block, and may keep state of its own between calls. Candidates that are unknown,
    listed twice or finished are ignored by admission.
    """

    traits: Traits

    def decide(self, view: View) -> Decision:
        """What should run, in which order, and who may be preempted for it."""
        ...
