"""Latency objectives and the classes of work that have them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WorkClass(StrEnum):
    """Who waits for the result: a person, a batch window, or the model itself."""

    ONLINE = "online"
    OFFLINE = "offline"
    LEARNING = "learning"


@dataclass(frozen=True, slots=True)
class Slo:
    """Objective of an online request, in seconds: time to first token, time per output token."""

    ttft_s: float
    tpot_s: float

    def met(self, ttft_s: float, tpot_s: float) -> str:
        """Which objectives an answer met: `both`, `ttft`, `tpot` or `neither`."""
        first, later = ttft_s <= self.ttft_s, tpot_s <= self.tpot_s
        if first and later:
            return "both"
        return "ttft" if first else "tpot" if later else "neither"


DEFAULT_SLO = Slo(ttft_s=1.0, tpot_s=0.1)
