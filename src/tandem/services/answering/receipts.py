"""Receipts: what was answered, so that feedback can refer to it by the completion's id.

A receipt is committed before the end of its answer is sent, and deleted when it is older than the
retention. A clock that is set wrong deletes nothing: time passes as far as this server has run.
Knows the store; knows neither engine nor HTTP. Invariant: a client that has read an answer to its
end finds its receipt, unless the store failed meanwhile (which is logged, and does not fail the
answer).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem.core.errors import InvalidRequest, NotFound, StoreError
from tandem.core.learning import Receipt, ReceiptChoice
from tandem.services.passed import Passed
from tandem.store import Store
from tandem.store import receipts as rows

_DAY_S = 86_400.0
_SWEEP_EVERY_S = 3600.0
_SWEPT_AT_ONCE = 500
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Draft:
    """A receipt before its answer: `receipt` lacks version and choices.

    `prompts` are the texts of a plain completion's prompts, in order; a chat has none.
    """

    receipt: Receipt
    prompts: tuple[str, ...] = ()

    def finish(self, version: str, answers: Sequence[Sequence[ReceiptChoice]]) -> Receipt:
        """The receipt; `answers[p]` are the choices of prompt p."""
        if len(self.prompts) > 1:
            answers = [
                [replace(choice, prompt=prompt) for choice in choices]
                for prompt, choices in zip(self.prompts, answers, strict=True)
            ]
        choices = tuple(choice for part in answers for choice in part)
        prompt = self.prompts[0] if len(self.prompts) == 1 else ""
        return replace(self.receipt, version=version, prompt=prompt, choices=choices)


def unknown_completion(completion_id: str) -> NotFound:
    """Nothing is kept, or not for this tenant."""
    return NotFound(
        f"no completion '{completion_id[:100]}' is known; its receipt may have expired, or belong "
        "to another key (send the messages and the answers themselves)",
        param="completion_id",
        code="completion_not_found",
    )


class Receipts:
    """Keeps receipts for `days`; with 0 it keeps none. `now` is the time since the epoch, and
    `monotonic` counts seconds whatever the clock is set to."""

    def __init__(
        self,
        store: Store,
        days: float,
        now: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._kept_s = days * _DAY_S
        self._now = now
        self._passed = Passed(store, now, monotonic)
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def enabled(self) -> bool:
        """Whether receipts are kept at all."""
        return self._kept_s > 0

    def now(self) -> float:
        """The time that a receipt is made with."""
        return self._now()

    async def keep(self, receipt: Receipt) -> None:
        """Commit a receipt. Does nothing when receipts are off; never fails."""
        if not self.enabled:
            return
        try:
            await self._store.write(rows.add, receipt)
        except StoreError as error:
            fields = {"completion_id": receipt.completion_id}
            _log.error("a receipt is lost", extra={"fields": fields}, exc_info=error)

    async def find(self, completion_id: str, tenant: str) -> Receipt:
        """The receipt of a tenant's completion. Raises `NotFound`, `InvalidRequest` when off."""
        if not self.enabled:
            raise InvalidRequest(
                "this server keeps no receipts (store.receipt_days is 0); send the messages and "
                "the answers themselves instead of 'completion_id'",
                param="completion_id",
            )
        receipt = await self._store.read(rows.find, completion_id)
        if receipt is None or receipt.tenant != tenant:
            raise unknown_completion(completion_id)
        return receipt

    async def sweep(self) -> int:
        """Delete what is older than the retention; how many receipts that were."""
        before_s = await self._passed.time_s() - self._kept_s
        swept = 0
        while True:
            number = await self._store.write(rows.delete_before, before_s, _SWEPT_AT_ONCE)
            swept += number
            if number < _SWEPT_AT_ONCE:
                break
        if swept:
            await self._store.scrub()
        return swept

    async def start(self) -> None:
        """Sweep now and then, until `stop`. Nothing is kept before."""
        await self._passed.time_s()
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def stop(self) -> None:
        """End the sweeping."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    async def _sweep_for_ever(self) -> None:
        while True:
            try:
                await self.sweep()
            except StoreError as error:
                _log.error("old receipts cannot be deleted", exc_info=error)
            await asyncio.sleep(_SWEEP_EVERY_S)
