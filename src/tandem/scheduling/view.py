"""What a policy sees, and the protocol that it implements.

The view is read-only by contract: policies must not change sequences. It is valid during one call
of `decide`. Invariant: nothing reachable from it pins blocks or changes state.
"""

from __future__ import annotations

from collections.abc import ValuesView
from dataclasses import dataclass
from typing import Protocol

from tandem.core.decision import Decision
from tandem.core.plan import StepPlan, StepResult
from tandem.core.sequence import Sequence
from tandem.kv.cache import KVCache
from tandem.scheduling.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of one iteration: sequences (spans) and tokens (rows of the forward pass)."""

    max_sequences: int
    max_batch_tokens: int


@dataclass(frozen=True, slots=True)
class View:
    """A policy's window on the scheduler. Times in seconds on the engine's clock."""

    now: float
    budgets: Budgets
    last_plan: StepPlan | None
    last_results: tuple[StepResult, ...]
    _state: SchedulerState
    _cache: KVCache

    @property
    def waiting(self) -> ValuesView[Sequence]:
        """Sequences without blocks, oldest first (preempted ones at the end)."""
        return self._state.waiting.values()

    @property
    def running(self) -> ValuesView[Sequence]:
        """Sequences that hold blocks, in the order in which they were admitted."""
        return self._state.running.values()

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

    def match(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence whose KV is cached now. Pins nothing."""
        return self._cache.match(seq)


class Policy(Protocol):
    """Decides once an iteration.

    Called by the scheduler whenever something waits or runs. Must be deterministic in the view,
    must not block, and may keep state of its own between calls. Candidates that are unknown,
    listed twice or finished are ignored by admission.
    """

    def decide(self, view: View) -> Decision:
        """What should run, in which order, and who may be preempted for it."""
        ...
