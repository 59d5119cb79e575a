"""How much one API key may teach one adapter, whichever way its samples come.

Knows counts, not samples. Invariant: what is refused was not counted, as the caller's transaction
is undone with it.
"""

from __future__ import annotations

from tandem.core.errors import QuotaExceeded
from tandem.services.auth import Caller
from tandem.store import Connection, usage

_DAY_S = 86_400.0


def spend_samples(
    connection: Connection, caller: Caller, adapter: str, number: int, now_s: float
) -> None:
    """Count `number` samples for `adapter`. Raises `QuotaExceeded`."""
    made = usage.add(connection, caller.tenant, f"samples/{adapter}", number, now_s)
    if 0 < caller.samples_cap < made:
        raise QuotaExceeded(
            f"this API key may contribute {caller.samples_cap} samples to '{adapter}'; ask for a "
            "key with a larger 'samples_cap'",
            retry_after_s=_DAY_S,
        )
