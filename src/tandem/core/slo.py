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
