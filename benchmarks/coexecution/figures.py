"""From the times of tokens and steps to the figures of one window, and of several rounds.

Knows no engine. A window with training begins with the first step and ends with the last one, so
that it holds whole steps only; serving is judged by the same window.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

Window = tuple[float, float]


@dataclass
class Sample:
    """One system in one round; a rate is None where the system does not do that.

    `tpot_s` has one entry for each request that ended inside the window, `gaps_s` one for each
    token but the first of a request, `ttft_s` one for each request whose first token came inside.
    `steps` is None where nothing is trained.
    """

    seconds: float
    rss_bytes: int
    output_tokens_per_s: float | None = None
    training_tokens_per_s: float | None = None
    tpot_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    steps: int | None = None


def training_window(train: dict[str, Any]) -> Window:
    """From the beginning of the first step to the end of the last, or until it was given up."""
    return train["began_s"], train["window_ends_s"]


def sample(
    window: Window,
    serve: dict[str, Any] | None,
    train: dict[str, Any] | None,
    rss_bytes: int,
) -> Sample:
    """Figures of what happened inside `window`; see `ClosedLoop.answer` and `Steps.answer`."""
    began_s, ended_s = window
    result = Sample(ended_s - began_s, rss_bytes)
    if train is not None:
        result.steps = len(train["ends_s"])
        result.training_tokens_per_s = len(train["ends_s"]) * train["step_tokens"] / result.seconds
    if serve is None:
        return result
    tokens = 0
    for request in serve["requests"]:
        times = request["token_s"]
        tokens += sum(began_s < at <= ended_s for at in times)
        result.gaps_s += [now - last for last, now in pairwise(times) if began_s < now <= ended_s]
        if times and began_s < times[0] <= ended_s:
            result.ttft_s.append(times[0] - request["asked_s"])
        if request["tpot"] and began_s < times[-1] <= ended_s:
            result.tpot_s.append((times[-1] - times[0]) / (len(times) - 1))
    result.output_tokens_per_s = tokens / result.seconds
    return result


def percentile(values: list[float], share: float) -> float:
    """Linear between the closest ranks, as numpy's default."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(samples: list[Sample]) -> dict[str, float]:
    """Medians of the rates over the rounds; latencies over all requests and tokens of them all."""
    figures: dict[str, float] = {"rss_gib": max(each.rss_bytes for each in samples) / 2**30}
    for name in ("output_tokens_per_s", "training_tokens_per_s"):
        rates = [rate for each in samples if (rate := getattr(each, name)) is not None]
        if rates:
            figures[name] = median(rates)
    step_s = [each.seconds / each.steps for each in samples if each.steps]
    if step_s:
        figures["step_ms"] = 1e3 * median(step_s)
    ttft_s = [value for each in samples for value in each.ttft_s]
    if ttft_s:
        figures["ttft_p50_ms"] = 1e3 * percentile(ttft_s, 0.5)
        figures["ttft_p99_ms"] = 1e3 * percentile(ttft_s, 0.99)
    tpot_s = [value for each in samples for value in each.tpot_s]
    gaps_s = [value for each in samples for value in each.gaps_s]
    if tpot_s:
        figures["tpot_mean_ms"] = 1e3 * fmean(tpot_s)
        figures["tpot_p50_ms"] = 1e3 * percentile(tpot_s, 0.5)
        figures["tpot_p99_ms"] = 1e3 * percentile(tpot_s, 0.99)
    if gaps_s:
        figures["gap_p50_ms"] = 1e3 * percentile(gaps_s, 0.5)
        figures["gap_p99_ms"] = 1e3 * percentile(gaps_s, 0.99)
    return figures


def ratio(ours: list[Sample], peer: list[Sample], figure: str) -> float:
    """Median over the rounds of the ratio within a round."""
    pairs = zip(ours, peer, strict=True)
    ratios: list[float] = [getattr(a, figure) / getattr(b, figure) for a, b in pairs]
    return median(ratios)
