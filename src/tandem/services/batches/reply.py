"""What answers one line: the seam between batches and the routes whose requests the lines are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tandem.core.batches import BatchRecord
from tandem.services.answering.models import Pin
from tandem.services.auth import Caller


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as the route would give it: HTTP's status and the body as JSON."""

    status: int
    body: Any
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Respond(Protocol):
    """Answers a request as its route does, without an objective, when there is room.

    A request that is wrong has a reply of 4xx. Raises `TandemError` for what is not the request's
    fault and may work later.
    """

    async def __call__(
        self, batch: BatchRecord, body: bytes, caller: Caller, pinned: Pin | None
    ) -> Reply:
        """The reply to the body of one of a batch's lines; `pinned` answers instead of the current
        version of its adapter."""
        ...
