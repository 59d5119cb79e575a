"""Batches of requests that are answered when there is room: OpenAI's Batch API as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class BatchStatus(StrEnum):
    """OpenAI's statuses."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing changes any more."""
        return self in _ENDED


_ENDED = frozenset(
    (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)
)


POOL_TOKENS = 500_000
"""Tokens of the lines that are in the engine at once: so many that long ones can share what is
cached, and so few that their memory is bounded. Lines share the bound of what waits
(`max_waiting_tokens`) with `flex` requests: half of it is theirs."""

WORKED_UNTIL = "worked_until"
"""Among the stamps of a batch: how far its completion window has passed."""


@dataclass(frozen=True, slots=True)
class BatchError:
    """What is wrong with the input file; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch. Times are in seconds since the epoch."""

    batch_id: str
    created_s: float
    tenant: str
    endpoint: str
    input_file: str
    """The id of the uploaded file."""
    completion_window: str
    expires_s: float
    status: BatchStatus = BatchStatus.VALIDATING
    start: int = 0
    """Counts the server starts that have worked on it: only the last one may commit."""
    model: str = ""
    """Of every line; known once the file was validated."""
    adapter: str | None = None
    """The adapter that `model` names."""
    version: int | None = None
    """The version of it that answers all lines (None: whichever is current)."""
    pinned: bool = True
    """Whether `version` is chosen when the work begins."""
    total: int = 0
    """Lines of a file that was validated; 0 until then."""
    completed: int = 0
    """Lines with an answer."""
    failed: int = 0
    """Lines with an error."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    output_file: str = ""
    """The id under which answers are written; it is given before the file is there."""
    error_file: str = ""
    output_kept_s: float | None = None
    """How long both files are kept (None: until they are deleted)."""
    errors: tuple[BatchError, ...] = ()
    stamps: dict[str, float] = field(default_factory=dict)
    """When each status began, and `WORKED_UNTIL`."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LineResult:
    """What became of one line of a batch. `content` is the line of the output or the error file."""

    batch_id: str
    number: int
    ok: bool
    content: str
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
