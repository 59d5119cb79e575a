"""The commands of learning: trainers, training steps, scores, snapshots of trainers.

Joins the learning half of a scheduler, the executor and the adapters that scores pin. All methods
are called from the loop's thread, except where one says so.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.clock import Clock
from tandem.core.errors import InvalidRequest
from tandem.core.ports import Executor, TrainerSnapshot
from tandem.core.training import Score, ScoreRequest, TrainerSpec, TrainerState, TrainingStep
from tandem.engine.loaded import LoadedAdapters
from tandem.scheduling.learning import Learned
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.scores import ScoreFailed


class Teaching:
    """Of one loop."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, adapters: LoadedAdapters, clock: Clock
    ) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._adapters, self._clock = adapters, clock

    def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """Open a trainer. One of the same name must be closed first. Raises `AdapterError`."""
        state = self._executor.open_trainer(spec)
        self._scheduler.learning.open_trainer(state)
        return state

    def read_trainer(self, spec: TrainerSpec) -> Callable[[], TrainerState]:
        """The blocking part of `open_trainer`, for any thread. Calling the result does the rest."""
        put = self._executor.read_trainer(spec)

        def rest() -> TrainerState:
            state = put()
            self._scheduler.learning.open_trainer(state)
            return state

        return rest

    def close_trainer(self, name: str) -> list[str]:
        """Free everything of a trainer; returns the ids of its steps. Idempotent."""
        cancelled = self._scheduler.learning.close_trainer(name)
        self._scheduler.wake()
        self._executor.close_trainer(name)
        return cancelled

    def snapshot_trainer(self, name: str) -> TrainerSnapshot:
        """Copy a trainer's state, which adapters `adopt`. Raises `NotFound`, `AdapterError`."""
        return self._executor.snapshot_trainer(name)

    def add_step(self, step: TrainingStep) -> None:
        """Queue a training step. Raises `InvalidRequest` if it can never run."""
        self._scheduler.learning.add_step(step, self._clock.now())
        self._scheduler.wake()

    def cancel_steps(self, trainer: str) -> list[str]:
        """Cancel a trainer's steps; returns their ids. Idempotent."""
        cancelled = self._scheduler.learning.cancel_steps(trainer)
        self._scheduler.wake()
        return cancelled

    def add_score(self, request: ScoreRequest) -> None:
        """Queue a score. Its adapter version is pinned now. Raises `InvalidRequest`."""
        if self._scheduler.is_active(request.request_id):
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        if request.adapter is not None and request.trainer is not None:
            raise InvalidRequest("score under an adapter or under a trainer, not under both")
        registry = self._adapters.registry
        version = registry.pin(request.adapter)
        try:
            self._scheduler.learning.add_score(request, version, self._clock.now())
        except BaseException:
            registry.unpin(version)
            raise
        self._adapters.holds.add(request.request_id, version)
        self._scheduler.wake()

    def take_learned(self) -> list[Learned]:
        """Steps and scores that have ended since the last call."""
        learned = self._scheduler.learning.take_ended()
        scores = [each for each in learned if isinstance(each, Score | ScoreFailed)]
        self._adapters.holds.let_go(each.request_id for each in scores)
        return learned
