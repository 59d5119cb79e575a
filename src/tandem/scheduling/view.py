"""What a policy sees, and the protocol that a policy implements.

The view is read-only by contract: policies must not change sequences. It is valid during one call
of `decide`. Invariant: nothing reachable from it pins blocks or changes state.
"""

from __future__ import annotations

from collections.abc import ValuesView
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tandem.core.decision import Decision
from tandem.core.plan import StepPlan, StepResult
from tandem.core.sequence import Sequence
from tandem.core.slo import Slo
from tandem.estimators.latency import LatencyModel
from tandem.kv.eviction import Eviction, ReadersLast
from tandem.scheduling.kv_view import KVView
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
    `starts` has the online sequences of `waiting` by the latest start that meets their objective.
    It and the lists are the scheduler's own, not to be changed.

    `now` is when the plan can begin. The device still computes slices of the last one for
    `trailing_s` until then, as predicted.
    """

    now: float
    budgets: Budgets
    last_plan: StepPlan | None
    last_results: tuple[StepResult, ...]
    latency: LatencyModel
    lanes: tuple[str, ...]
    kv: KVView
    starts: StartTimes
    default_slo: Slo  # of requests that bring none
    trailing_s: float
    _state: SchedulerState
    _learning: Learning

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
        """`waiting` by class and arrival."""
        return self._state.waiting.in_order

    @property
    def learning_in_order(self) -> list[Sequence]:
        """`learning` by arrival."""
        return self._state.learning.in_order

    @property
    def running_in_order(self) -> list[Sequence]:
        """`running` by class and arrival."""
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

    def slo(self, seq: Sequence) -> Slo:
        """The objective of a sequence: its request's, else the server's."""
        return seq.request.slo or self.default_slo


@dataclass(frozen=True, slots=True)
class Traits:
    """What a policy promises about itself."""

    # While nothing but decodes of one class runs: all of them run on the whole device, whatever the
    # time. Eviction follows the cache's own order. Later decisions are the same whether the policy
    # decided in each of these iterations or only in the first. `sim.leap.Leaper` and `Flight` rely
    # on this: `View.last_plan` is then the last one that was decided.
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
    """Decides once per iteration, but for those that `Traits.decodes_alike` spares it.

    The scheduler calls it whenever something waits or runs. It must be deterministic in the view
    and must not block. It may keep state between calls. Admission ignores candidates that are
    unknown, finished or listed twice.
    """

    traits: Traits

    def decide(self, view: View) -> Decision:
        """What should run, in which order, and which sequences may be preempted for it."""
        ...
