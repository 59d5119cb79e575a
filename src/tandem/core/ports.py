"""The seams: what each side of a boundary may expect of the other.

`build.py` joins implementations to these protocols; no package imports the other side.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from enum import StrEnum
from typing import Protocol

from tandem.core.events import EngineStats, ModelInfo, TokenEvent
from tandem.core.plan import LanePlan, StepResult
from tandem.core.request import Request
from tandem.core.training import (
    Score,
    ScoreRequest,
    StepOutcome,
    TrainerSpec,
    TrainerState,
    TrainingStep,
)
from tandem.core.version import AdapterVersion

# Whether something has come that work which gives way is not to hold up.
Urgent = Callable[[], bool]


def never() -> bool:
    """Nothing is urgent."""
    return False


class TrainerSnapshot(Protocol):
    """A copy of a trainer's parameters and optimiser state at one revision."""

    @property
    def state(self) -> TrainerState:
        """Of which trainer, at which revision."""
        ...

    def write(self, path: str) -> None:
        """Write PEFT's files and the optimiser state into the new directory `path`, with fsync.

        May be called from any thread. Raises `AdapterError`; then `path` does not exist.
        """
        ...


class Executor(Protocol):
    """Runs plans. Called by the engine loop, from one thread.

    The executor owns weights and KV tensors; the scheduler owns the block numbers. Work of one
    lane runs in the order of submission. Adapters are known by content hash and must be loaded
    before a plan names them; loading and dropping happen between two iterations only.
    """

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        ...

    def submit(self, plan: LanePlan, urgent: Urgent = never) -> int:
        """Start `plan` and return a ticket. May compute before it returns.

        If the plan gives way, `urgent` is asked before every layer.
        """
        ...

    def poll(self) -> list[StepResult]:
        """Results of finished plans, in order; waits for at least one if any is in flight."""
        ...

    def read_adapter(self, version: AdapterVersion) -> Callable[[], None]:
        """Read and check the files of `version`; calling what it returns makes
        `version.content_hash` usable.

        May be called from any thread, beside an iteration. Raises `AdapterError`.
        """
        ...

    def drop_adapter(self, content_hash: str) -> None:
        """Forget an adapter that no sequence uses any more."""
        ...

    def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """Make working parameters under `spec.name`. Raises `AdapterError`; nothing changed then.

        A span whose adapter is `working_key(spec.name)` runs with them as they are at that time.
        """
        ...

    def read_trainer(self, spec: TrainerSpec) -> Callable[[], TrainerState]:
        """Read what `spec.source` holds; calling what it returns is the rest of `open_trainer`.

        May be called from any thread, beside an iteration. Raises `AdapterError`, and so may the
        rest.
        """
        ...

    def close_trainer(self, name: str) -> None:
        """Free everything of a trainer, recordings included. Harmless if it is not open."""
        ...

    def snapshot_trainer(self, name: str) -> TrainerSnapshot:
        """Copy the working parameters. Raises `AdapterError` if the trainer is not open."""
        ...

    def adopt(self, snapshot: TrainerSnapshot, content_hash: str) -> None:
        """Make a snapshot usable as adapter `content_hash`; nothing is read."""
        ...

    def memory_bytes(self) -> Mapping[str, int]:
        """The memory account: bytes by purpose (weights, kv, recordings, graphs, trainers ...)."""
        ...


class EngineState(StrEnum):
    """Life of an engine as its client sees it.

    A `QUIET` engine was ready and has not been heard of for a while. It takes what it is sent once
    it goes on, and is dead if it does not.
    """

    STARTING = "starting"
    READY = "ready"
    QUIET = "quiet"
    DEAD = "dead"
    DRAINING = "draining"


class ServingEngine(Protocol):
    """What answers requests: tokens, adapters by name, and how it is."""

    @property
    def state(self) -> EngineState:
        """Whether requests can be taken now; true to the process's real state within two
        seconds."""
        ...

    @property
    def info(self) -> ModelInfo:
        """The served model. Raises `EngineDead` before the engine was ready for the first time."""
        ...

    @property
    def adapters(self) -> dict[str, AdapterVersion]:
        """Adapters by name, at their current version."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Events of all choices until each has a `finish_reason`.

        Closing the generator aborts what still runs. Raises `EngineDead` if the engine ends
        meanwhile, `NotFound` for an unknown adapter, `InvalidRequest` if it can never fit.
        """
        ...

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop one choice (or all); its blocks are free within one iteration. Idempotent."""
        ...

    async def load_adapter(self, name: str, path: str) -> AdapterVersion:
        """Load a PEFT directory as the current version of `name`; running requests keep theirs."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Remove a name; its version goes when its last request ends. Raises `NotFound`.

        Where this raises `EngineDead`, the next engine does not load it either.
        """
        ...

    async def publish_adapter(self, version: AdapterVersion) -> AdapterVersion:
        """Make `version` the current one of its name, with its number.

        If its content is loaded already (as a candidate is after `stage`), nothing is read from
        disk; else its files are, and they must have its hash. Raises `AdapterError`.
        """
        ...

    def expect_adapter(self, version: AdapterVersion) -> None:
        """After `publish_adapter` raised `EngineDead`: the next engine loads `version`, before its
        first request, and not what its name meant before. Does nothing while the engine is ready.
        """
        ...

    async def stats(self) -> EngineStats:
        """Counters and gauges of the engine. Raises `EngineDead`."""
        ...


class TeachingEngine(Protocol):
    """What learns: trainers, their steps and copies, and log-probabilities of given answers."""

    async def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """Open a trainer; one of the same name is closed first. Raises `AdapterError`.

        Trainers do not survive the engine. Whatever needs one that went with an engine raises
        `EngineDead` until it is opened again, however long ago that was.
        """
        ...

    async def close_trainer(self, name: str) -> None:
        """Cancel the trainer's steps and free its memory. Idempotent."""
        ...

    async def train(self, step: TrainingStep) -> StepOutcome:
        """Run one step when the policy finds room for it; steps of a trainer run in order.

        Raises `TrainingCancelled`, `EngineDead`, or `InvalidRequest` if it can never fit.
        """
        ...

    async def cancel_steps(self, trainer: str) -> None:
        """Give up all steps of a trainer that have not been updated yet. Idempotent."""
        ...

    async def stage(self, trainer: str, name: str, path: str) -> AdapterVersion:
        """Save the working parameters to the new directory `path` and load them as `name`.

        The copy is taken between two iterations, the files are written beside them; training may
        go on meanwhile. `path` also holds the optimiser state, to be a trainer's `source`.
        """
        ...

    async def score(self, request: ScoreRequest) -> Score:
        """Log-probability of a given completion, computed when there is room (work class
        learning). Raises as `generate` does."""
        ...


class EngineClient(ServingEngine, TeachingEngine, Protocol):
    """The async handle that services use; one engine, another process or a cluster look alike."""

    async def start(self) -> None:
        """Start the engine and return when it is ready. Raises what made loading fail."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take no new request, wait for the running ones; False if time ran out."""
        ...

    async def close(self) -> None:
        """End the engine at once."""
        ...
