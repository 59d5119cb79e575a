"""Latency objectives and the classes of work that have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.errors import InvalidRequest


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

    def start_by(self, arrival_s: float) -> float:
        """Latest start of a request that came at `arrival_s`, so that it meets `ttft_s`. The last
        quarter of `ttft_s` is for computing its prompt."""
        return arrival_s + 0.75 * self.ttft_s

    def met(self, ttft_s: float, tpot_s: float) -> str:
        """Which objectives an answer met: `both`, `ttft`, `tpot` or `neither`."""
        first, later = ttft_s <= self.ttft_s, tpot_s <= self.tpot_s
        if first and later:
            return "both"
        return "ttft" if first else "tpot" if later else "neither"

    @staticmethod
    def parse(text: str) -> Slo:
        """The objective in `TTFT:TPOT`, in seconds, such as `0.5:0.05`. Raises `InvalidRequest`."""
        try:
            ttft_s, tpot_s = map(float, text.split(":"))
        except ValueError:
            ttft_s = tpot_s = math.nan
        if not (0.0 < ttft_s < math.inf and 0.0 < tpot_s < math.inf):
            raise InvalidRequest(f"{text!r} is no objective; write TTFT:TPOT in seconds: 0.5:0.05")
        return Slo(ttft_s, tpot_s)


DEFAULT_SLO = Slo(ttft_s=1.0, tpot_s=0.1)


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives of requests that bring none, or only one of the two: those of their adapter
    (`base` is the model itself), else the `default`."""

    default: Slo = DEFAULT_SLO
    adapters: Mapping[str, Slo] = field(default_factory=dict)

    @staticmethod
    def parse(default: Slo, adapters: Mapping[str, str]) -> Objectives:
        """From texts that `Slo.parse` reads, by adapter. Raises `InvalidRequest`."""
        return Objectives(default, {name: Slo.parse(text) for name, text in adapters.items()})

    def of(self, adapter: str, ttft_s: float | None = None, tpot_s: float | None = None) -> Slo:
        """The objective of a request for `adapter` that brings `ttft_s` and `tpot_s` (seconds)."""
        usual = self.adapters.get(adapter, self.default)
        return Slo(ttft_s or usual.ttft_s, tpot_s or usual.tpot_s)
