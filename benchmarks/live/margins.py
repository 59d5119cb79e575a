"""What the gate measured of versions, beside its bounds: how far good and bad ones are from them.

Knows the metrics that the API gives with a version. Invariant: a measure is turned so that the
usual bound alone decides, as in `services/learning/gate.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.live.api import Version
from tandem.services.learning.gate import ROUNDING, Bounds

Metrics = dict[str, Any]
_BOUNDS = Bounds()


def _share_of_asked(name: str) -> Callable[[Metrics], float]:
    return lambda found: found[name] / min(1.0, found[f"asked_{name}"])


MEASURES: dict[str, tuple[str, Callable[[Metrics], float]]] = {
    "broken answers, share": (
        f"at most {_BOUNDS.faults:g}",
        lambda found: found["broken_answers"] / found["answers_read"],
    ),
    "kept content words, of the chosen answers' share": (
        f"at least {_BOUNDS.kept:g}",
        _share_of_asked("kept"),
    ),
    "length, of the chosen answers'": (f"at least {_BOUNDS.length:g}", _share_of_asked("length")),
    "quality drop, nats a token": (
        f"at most {_BOUNDS.quality_drop:g}",
        lambda found: found["canary_quality_drop"],
    ),
    "divergence beyond what is allowed, nats a token": (
        "at most 0",
        lambda found: found["canary_divergence"] - _BOUNDS.allowed(found["asked_divergence"]),
    ),
    "the chosen answers' own divergence, nats a token": (
        f"at most {_BOUNDS.noise:g}",
        lambda found: found["asked_divergence"],
    ),
    "chosen gain, nats a token": (f"at least -{ROUNDING:g}", lambda found: found["chosen_gain"]),
}


def stated(version: Version) -> dict[str, Any]:
    """A version as rows keep it."""
    return {
        "version": version.number,
        "state": version.state,
        "served": version.served,
        "reason": version.reason,
        "metrics": version.metrics,
    }


def margins(versions: Sequence[dict[str, Any]]) -> list[str]:
    """A table of versions as `stated`: least, median and most of each measure, of those that were
    served and of those that were refused. Empty where none is (rows of older code)."""
    known = [each for each in versions if "metrics" in each]
    if not known:
        return []
    groups = {
        "published": [each for each in known if each["served"]],
        "refused": [each for each in known if each["state"] == "refused"],
    }
    named = [f"{name} ({len(found)}): least, median, most" for name, found in groups.items()]
    lines = ["", f"| the gate's measure | bound | {' | '.join(named)} |", "|---|---|---|---|"]
    for name, (bound, measure) in MEASURES.items():
        cells = (_range(measure, found) for found in groups.values())
        lines.append(f"| {name} | {bound} | {' | '.join(cells)} |")
    return lines


def _range(measure: Callable[[Metrics], float], versions: Sequence[dict[str, Any]]) -> str:
    """Of those that were measured: a metric may be missing, not finite, or a share of nothing."""
    found = []
    for each in versions:
        try:
            found.append(float(measure(each["metrics"])))
        except (KeyError, TypeError, ZeroDivisionError):
            continue
    if not found:
        return "-"
    return ", ".join(f"{value:.2f}" for value in (min(found), median(found), max(found)))
