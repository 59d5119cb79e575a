"""What a policy sees, and the protocol that a policy implements.

The view is read-only by contract: policies must not change sequences. It is valid during one call
of `decide`. Invariant: nothing reachable from it pins blocks or changes state.
"""

from __future__ import annotations

from collections.abc import Iterable, ValuesView
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tandem.core.decision import Decision
from tandem.core.plan import StepPlan, StepResult
from tandem.core.sequence import Sequence
from tandem.core.slo import Slo, WorkClass
from tandem.estimators.latency import LatencyModel
from tandem.estimators.memory import DemandWindow
from tandem.kv.cache import KVCache
from tandem.kv.eviction import Eviction, IdleBlock, ReadersLast
from tandem.kv.holders import Apart
from tandem.kv.offline_pool import OfflinePool
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
    """A policy's window on the scheduler. Times are seconds on the engine's clock.

    `latency` predicts times on the first of `lanes`, the device. Sequences with `scoring` belong to
    learning: those of training steps (with `scoring.step_id`) and scores requested on their own.
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

        A trainer's sequences are here only if they belong to its first step. A sequence whose
        recording does not fit does not start, and later candidates may start before it.
        """
        return self._state.learning.values()

    @property
    def running(self) -> ValuesView[Sequence]:
        """Sequences that hold blocks, learning's included, in order of admission."""
        return self._state.running.values()

    @property
    def waiting_in_order(self) -> list[Sequence]:
        """`waiting` by class and arrival: the scheduler's own list, not to be changed."""
        return self._state.waiting.in_order

    @property
    def starts(self) -> StartTimes:
        """Online sequences of `waiting` by the latest start that meets their objective: the
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
        """The sequences of `running` that belong to requests, by class and arrival."""
        return self._state.running.requests

    @property
    def steps(self) -> list[StepWork]:
        """The training step of each trainer that may run now, oldest first."""
        return self._learning.heads

    @property
    def scores(self) -> ValuesView[Sequence]:
        """Scores requested on their own, oldest first, waiting and running."""
        return self._learning.scores.sequences

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
        """Tokens per KV block."""
        return self._cache.block_size

    @property
    def num_blocks(self) -> int:
        """All KV blocks."""
        return self._cache.num_blocks

    @property
    def available_blocks(self) -> int:
        """KV blocks available without a preemption."""
        return self._cache.available_blocks

    def held_blocks(self, work_class: WorkClass) -> int:
        """KV blocks of the running sequences of a class; a shared block counts once for each."""
        return self._cache.holders.held_by(
            [seq for seq in self.running if class_of(seq) is work_class]
        )

    @property
    def online_demand_blocks(self) -> float:
        """KV blocks to leave to online requests: the larger of what they hold now and mu + 2 sigma
        of what they held in the last hour (Echo 5.3). Counted as in `held_blocks`."""
        return max(float(self.held_blocks(WorkClass.ONLINE)), self._demand.demand)

    def blocks_of(self, sequences: Iterable[Sequence]) -> int:
        """KV blocks of these running sequences; a shared block counts once for each."""
        return self._cache.holders.held_by(sequences)

    def blocks_apart(self, sequences: Iterable[Sequence]) -> Apart:
        """Which KV blocks each of these running sequences holds alone, and how many of them several
        of these hold."""
        return self._cache.holders.apart(sequences)

    def idle_blocks(self) -> list[IdleBlock]:
        """Cached blocks that no sequence holds, with their future readers. Costs O(blocks)."""
        return self._cache.idle_blocks()

    @property
    def offline_pool(self) -> OfflinePool:
        """The offline sequences of `waiting` by length and cached prefix: the cache's own, not to
        be changed."""
        return self._cache.offline

    def new_blocks(self, seq: Sequence, num_tokens: int, ranks: int = len(WorkClass)) -> int:
        """Blocks that a waiting sequence of so many tokens needs beside those that others hold;
        `ranks`: others of lower ranks (`Sequence.order`) only."""
        return self._cache.new_blocks(seq, num_tokens, ranks)

    def wanted_evictions(self, num_blocks: int) -> float:
        """Blocks with future readers that have to go for so many new ones."""
        return self._cache.wanted_evictions(num_blocks)

    def match(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence whose KV is cached now. Pins nothing."""
        return self._cache.match(seq)


def class_of(seq: Sequence) -> WorkClass:
    """The class of a sequence. Scored sequences belong to learning."""
    return WorkClass.LEARNING if seq.scoring is not None else seq.request.work_class


@dataclass(frozen=True, slots=True)
class Traits:
    """What a policy promises about itself."""

    # While nothing but decodes of one class runs: all of them run on the whole device, whatever the
    # time. Eviction follows the cache's own order. Later decisions are the same whether the policy
    # decided in each of these iterations or only in the first. `sim.leap.Leaper` relies on this.
    decodes_alike: bool = False
    # With `decodes_alike`, also while requests wait: whether one starts does not depend on time,
    # only on what waits and what runs.
    waits_alike: bool = False
    # Recordings are kept so small that a request can wait for one layer of one. Useful for a policy
    # with preemptible passes.
    records_in_parts: bool = False
    trains: bool = True  # training steps eventually run
    heeds_priority: bool = False  # requests are ordered by their `priority`
    eviction: Eviction = field(default_factory=ReadersLast)  # of the KV cache


@runtime_checkable
class Policy(Protocol):
    """Decides once per iteration.

    The scheduler calls it whenever something waits or runs. It must be deterministic in the view
    and must not block. It may keep state between calls. Admission ignores candidates that are
    unknown, finished or listed twice.
    """

    traits: Traits

    def decide(self, view: View) -> Decision:
        """What should run, in which order, and which sequences may be preempted for it."""
        ...
