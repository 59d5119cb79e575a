"""The seams: what each side of a boundary may expect of the other.

`build.py` joins implementations to these protocols; no package imports the other side.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import Protocol

from tandem.core.events import EngineStats, ModelInfo, TokenEvent
from tandem.core.plan import LanePlan, StepResult
from tandem.core.request import Request
from tandem.core.version import AdapterVersion


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

    def submit(self, plan: LanePlan) -> int:
        """Start `plan` and return a ticket. May compute before it returns."""
        ...

    def poll(self) -> list[StepResult]:
        """Results of finished plans, in order; waits for at least one if any is in flight."""
        ...

    def load_adapter(self, version: AdapterVersion) -> None:
        """Make `version.content_hash` usable. Raises `AdapterError`; then nothing changed."""
        ...

    def drop_adapter(self, content_hash: str) -> None:
        """Forget an adapter that no sequence uses any more."""
        ...


class EngineState(StrEnum):
    """Life of an engine as its client sees it."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    DRAINING = "draining"


class EngineClient(Protocol):
    """The async handle that services use; one engine, another process or a cluster look alike."""

    @property
    def state(self) -> EngineState:
        """Whether requests can be taken now; true to the process's real state within a second."""
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
        """Remove a name; its version goes when its last request ends. Raises `NotFound`."""
        ...

    async def stats(self) -> EngineStats:
        """Counters and gauges of the engine. Raises `EngineDead`."""
        ...

    async def start(self) -> None:
        """Start the engine and return when it is ready. Raises what made loading fail."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take no new request, wait for the running ones; False if time ran out."""
        ...

    async def close(self) -> None:
        """End the engine at once."""
        ...
