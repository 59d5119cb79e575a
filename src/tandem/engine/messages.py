"""Messages between an engine host and its client: commands down, messages up.

Tagged msgspec unions, encoded as MessagePack between processes and passed as objects within one.
Invariant: every message of a host carries its incarnation, so a client never mistakes messages of a
dead engine for those of its successor.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.core.errors import (
    AdapterError,
    DiskError,
    EngineDead,
    InvalidRequest,
    NoMemory,
    NotFound,
    OutOfMemory,
    StoreError,
    TandemError,
    TrainingCancelled,
    UnsupportedModel,
)
from tandem.core.events import ModelInfo, TokenEvent
from tandem.core.lengths import Forecast
from tandem.core.request import Request
from tandem.core.training import (
    ScoreRequest,
    TrainerSpec,
    TrainingStep,
)
from tandem.core.version import AdapterVersion


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Take a request. Answered by `Tokens` or `Refused`."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a choice, or all choices. Not answered."""

    request_id: str
    index: int | None = None


class Foresee(msgspec.Struct, frozen=True, tag=True):
    """More is known of how long a request's answers will be. Not answered."""

    request_id: str
    length: Forecast


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Publish the files at `path` as `name`. Answered by `CallResult`.

    `restore` is the version that the name had before a restart. The files must still have its
    content, and the version keeps its number.
    """

    call: int
    name: str
    path: str
    restore: AdapterVersion | None = None


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Remove a name. Answered by `CallResult`."""

    call: int
    name: str


class PublishAdapter(msgspec.Struct, frozen=True, tag=True):
    """Make a given version the current one of its name; answered by an `AdapterVersion`."""

    call: int
    version: AdapterVersion


class OpenTrainer(msgspec.Struct, frozen=True, tag=True):
    """Open a trainer, after closing one of its name; answered by a `TrainerState`."""

    call: int
    spec: TrainerSpec


class CloseTrainer(msgspec.Struct, frozen=True, tag=True):
    """Cancel a trainer's steps and free it. Answered by `CallResult`."""

    call: int
    name: str


class Train(msgspec.Struct, frozen=True, tag=True):
    """Run a training step; answered by a `StepOutcome` when it has ended."""

    call: int
    step: TrainingStep


class CancelSteps(msgspec.Struct, frozen=True, tag=True):
    """Cancel a trainer's steps. Each step is answered with a failure, then this by `CallResult`."""

    call: int
    trainer: str


class StageTrainer(msgspec.Struct, frozen=True, tag=True):
    """Save a trainer at `path` and load that as `name`; answered by an `AdapterVersion`."""

    call: int
    trainer: str
    name: str
    path: str


class AddScore(msgspec.Struct, frozen=True, tag=True):
    """Score a completion; answered by a `Score`. `Abort` gives it up, unanswered."""

    call: int
    request: ScoreRequest


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """Answered by `EngineStats`, with the `last` iterations (at most) after number `after`."""

    call: int
    last: int = 0
    after: int = 0


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the host after this iteration."""


# Commands with effects that are answered by `CallResult`, now or later.
Call = (
    LoadAdapter
    | UnloadAdapter
    | PublishAdapter
    | OpenTrainer
    | CloseTrainer
    | Train
    | CancelSteps
    | StageTrainer
    | AddScore
)
Command = AddRequest | Abort | Foresee | Call | GetStats | Stop


class Failure(msgspec.Struct, frozen=True):
    """One of Tandem's errors as data. `to_exception` turns it back into the exception."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of the start: the present stage, and the share done (0 to 1)."""

    incarnation: int
    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    incarnation: int
    info: ModelInfo


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The host could not start, and ends now."""

    incarnation: int
    failure: Failure


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """Events of one iteration."""

    incarnation: int
    events: list[TokenEvent]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request was not taken."""

    incarnation: int
    request_id: str
    failure: Failure


class CallResult(msgspec.Struct, frozen=True, tag=True):
    """The outcome of a call: a failure, or the `result` that its command names. On the wire that is
    plain data; who called knows its type."""

    incarnation: int
    call: int
    failure: Failure | None = None
    result: Any = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The process lives. `busy_s` is how long the current iteration has been running."""

    incarnation: int
    busy_s: float


class Quiet(msgspec.Struct, frozen=True, tag=True):
    """The host has sent nothing for a while, or sends again. Made by its watcher, not by the host.

    The host may be paused, or the machine busy: it keeps its requests.
    """

    incarnation: int
    quiet: bool


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The host of this incarnation is gone. Made by its watcher, never by the host."""

    incarnation: int
    reason: str


Message = Loading | Ready | Broken | Tokens | Refused | CallResult | Heartbeat | Quiet | Lost

_ERRORS: dict[str, type[TandemError]] = {
    cls.__name__: cls
    for cls in (
        TandemError,
        InvalidRequest,
        NotFound,
        AdapterError,
        NoMemory,
        OutOfMemory,
        UnsupportedModel,
        EngineDead,
        TrainingCancelled,
        StoreError,
        DiskError,
    )
}


def failure_of(error: Exception) -> Failure:
    """An exception as data. One that is not Tandem's becomes a `TandemError` with its text."""
    # A text of a client's file may have characters that cannot be sent.
    told = str(error).encode("utf-8", "backslashreplace").decode()
    if isinstance(error, InvalidRequest):
        return Failure(type(error).__name__, told, error.param, error.code)
    if isinstance(error, TandemError):
        return Failure(type(error).__name__, told)
    return Failure("TandemError", f"{type(error).__name__}: {told}")


def to_exception(failure: Failure) -> TandemError:
    """The exception that `failure_of` was given, or one of a base class."""
    cls = _ERRORS.get(failure.kind, TandemError)
    if issubclass(cls, InvalidRequest):
        return cls(failure.message, param=failure.param, code=failure.code)
    return cls(failure.message)
