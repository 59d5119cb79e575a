"""The seams: the contracts between packages that do not import each other.

`build.py` joins implementations to these protocols. Invariant: no package imports the other side.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from enum import StrEnum
from typing import Protocol

from tandem.core.events import EngineStats, ModelInfo, TokenEvent
from tandem.core.lengths import Forecast
from tandem.core.plan import LanePlan, StepResult
from tandem.core.request import Request
from tandem.core.sampling import Grammar
from tandem.core.training import (
    Score,
    ScoreRequest,
    StepOutcome,
    TrainerSpec,
    TrainerState,
    TrainingStep,
)
from tandem.core.version import AdapterVersion

# Told which sequences have ended.
EndDraws = Callable[[Iterable[int]], None]
# Whether something has come for which a preemptible plan has to end.
Urgent = Callable[[], bool]


def never() -> bool:
    """Nothing is urgent."""
    return False


class TrainerSnapshot(Protocol):
    """A copy of a trainer's parameters and optimiser state at one revision."""

    @property
    def state(self) -> TrainerState:
        """The trainer and the revision of the copy."""
        ...

    def write(self, path: str) -> None:
        """Write PEFT's files and the optimiser state to the new directory `path`, with fsync.

        May be called from any thread. Raises `AdapterError`; `path` does not exist then.
        """
        ...


class Executor(Protocol):
    """Runs plans. Called by the engine loop, from one thread.

    The executor owns weights and KV tensors; the scheduler owns the block numbers. Work of one lane
    runs in the order of submission. Adapters are identified by content hash and must be loaded
    before a plan names them. They are loaded and dropped between two iterations only.
    """

    # Whether it gains from plans that follow: `submit` returned before the last plan was computed.
    runs_ahead: bool

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        ...

    def submit(self, plan: LanePlan, urgent: Urgent = never) -> int:
        """Start `plan` and return a ticket. May compute before it returns.

        If the plan is `preemptible`, `urgent` is called before every layer.
        """
        ...

    def poll(self) -> list[StepResult]:
        """Results of finished plans, in order. Waits for at least one if a plan is in flight, but
        not for a plan that follows one that was not polled before."""
        ...

    def compile_grammar(self, grammar: Grammar) -> EndDraws:
        """Make the first draw under `grammar` as fast as later ones, for as long as the result is
        kept. Calling that with the ids of sequences that have ended frees what was kept for them.

        May be called from any thread, beside an iteration. Raises `InvalidRequest` if the grammar
        is wrong, too complex, or not possible with this model.
        """
        ...

    def read_adapter(self, version: AdapterVersion) -> Callable[[], None]:
        """Read and check the files of `version`. Calling the result makes `version.content_hash`
        usable.

        May be called from any thread, beside an iteration. Raises `AdapterError`.
        """
        ...

    def drop_adapter(self, content_hash: str) -> None:
        """Forget an adapter that no sequence uses."""
        ...

    def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """Make working parameters under `spec.name`. Raises `AdapterError`; nothing changed then.

        A span with adapter `working_key(spec.name)` uses the working parameters as they are when it
        runs.
        """
        ...

    def read_trainer(self, spec: TrainerSpec) -> Callable[[], TrainerState]:
        """Read the files of `spec.source`. Calling the result does the rest of `open_trainer`.

        May be called from any thread, beside an iteration. Both calls may raise `AdapterError`.
        """
        ...

    def close_trainer(self, name: str) -> None:
        """Free everything of a trainer, including recordings. Does nothing if it is not open."""
        ...

    def snapshot_trainer(self, name: str) -> TrainerSnapshot:
        """Copy the working parameters. Raises `AdapterError` if the trainer is not open."""
        ...

    def adopt(self, snapshot: TrainerSnapshot, content_hash: str) -> None:
        """Make a snapshot usable as adapter `content_hash`. Reads no file."""
        ...

    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes by purpose (weights, kv, recordings, graphs, trainers ...)."""
        ...


class EngineState(StrEnum):
    """State of an engine as its client sees it.

    A `QUIET` engine was ready but has sent nothing for a while. Either it continues and then takes
    what it was sent, or it is dead.
    """

    STARTING = "starting"
    READY = "ready"
    QUIET = "quiet"
    DEAD = "dead"
    DRAINING = "draining"


class ServingEngine(Protocol):
    """The side that answers requests: tokens, adapters by name, state."""

    @property
    def state(self) -> EngineState:
        """Whether requests can be taken now. Follows the process within two seconds."""
        ...

    @property
    def info(self) -> ModelInfo:
        """The served model. Raises `EngineDead` until the engine was ready for the first time."""
        ...

    @property
    def adapters(self) -> dict[str, AdapterVersion]:
        """Adapters by name, at their current version."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Events of all choices, until each has a `finish_reason`.

        Closing the generator aborts what still runs. Raises `EngineDead` if the engine ends
        meanwhile, `NotFound` for an unknown adapter, `InvalidRequest` if the request can never fit.
        """
        ...

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop one choice, or all. Its blocks are free within one iteration. Idempotent."""
        ...

    def foresee(self, request_id: str, length: Forecast) -> None:
        """More is known now of how long a running request's answers will be. Does nothing if it has
        ended."""
        ...

    async def load_adapter(self, name: str, path: str) -> AdapterVersion:
        """Load a PEFT directory as the current version of `name`. Running requests keep theirs."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Remove a name. Its version is dropped when its last request ends. Raises `NotFound`.

        `adapters` lacks the name at once, also if the call is cancelled. If this raises
        `EngineDead`, the next engine does not load it either.
        """
        ...

    async def publish_adapter(self, version: AdapterVersion) -> AdapterVersion:
        """Make `version` the current one of its name, with its number.

        If its content is already loaded (as a candidate's is after `stage`), no file is read.
        Otherwise its files are loaded, and must have its hash. Raises `AdapterError`.
        """
        ...

    def expect_adapter(self, version: AdapterVersion) -> None:
        """Called after `publish_adapter` raised `EngineDead`. The next engine loads `version`
        before its first request, instead of what the name meant before. Does nothing while the
        engine is ready."""
        ...

    async def stats(self, last: int = 0, after: int = 0) -> EngineStats:
        """Counters and gauges of the engine, and its last iterations: at most `last` of those after
        the iteration `after`, as far as they are kept. Raises `EngineDead`."""
        ...


class TeachingEngine(Protocol):
    """The side that learns: trainers, their steps and copies, and scores of given answers."""

    async def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """Open a trainer; one of the same name is closed first. Raises `AdapterError`.

        Trainers do not survive the engine. After an engine died, every call that needs its trainer
        raises `TrainerLost` (an `EngineDead`) until the trainer is opened again.
        """
        ...

    async def close_trainer(self, name: str) -> None:
        """Cancel the trainer's steps and free its memory. Idempotent."""
        ...

    async def train(self, step: TrainingStep) -> StepOutcome:
        """Run one step when the policy finds time for it. Steps of a trainer run in order.

        Raises `TrainingCancelled`, `EngineDead`, or `InvalidRequest` if it can never fit.
        """
        ...

    async def cancel_steps(self, trainer: str) -> None:
        """Cancel all steps of a trainer whose update was not made yet. Idempotent."""
        ...

    async def stage(self, trainer: str, name: str, path: str) -> AdapterVersion:
        """Save the working parameters to the new directory `path` and load them as `name`.

        The copy is taken between two iterations. The files are written beside the iterations, and
        training may go on meanwhile. `path` also gets the optimiser state, so it can be a trainer's
        `source`.
        """
        ...

    async def score(self, request: ScoreRequest) -> Score:
        """Log-probability of a given completion, computed when the policy finds time for it (work
        class learning). Raises as `generate` does, and `NoMemory` where the engine is short of
        it."""
        ...


class EngineClient(ServingEngine, TeachingEngine, Protocol):
    """The async handle that services use. It may stand for a thread, a process or a cluster."""

    async def start(self) -> None:
        """Start the engine and return when it is ready. Raises the error that made loading fail."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for the running ones. False if time ran out."""
        ...

    async def close(self) -> None:
        """End the engine at once."""
        ...
