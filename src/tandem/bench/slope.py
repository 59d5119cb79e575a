"""Tells whether a series grows: a straight line through it, with a confidence interval.

Samples of a process's memory are correlated. So they are averaged over windows, and the line is
fitted through the windows' means. Knows nothing of processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, linear_regression

WINDOWS = 20
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per second with its 95% confidence interval, in the unit of the values."""

    per_s: float
    low_per_s: float
    high_per_s: float
    samples: int

    @property
    def interval(self) -> tuple[float, float, float]:
        """Estimate, lower and upper end."""
        return self.per_s, self.low_per_s, self.high_per_s

    @property
    def grows(self) -> bool:
        """True if the whole interval is above zero."""
        return self.low_per_s > 0.0


def fit_slope(times_s: Sequence[float], values: Sequence[float]) -> Slope | None:
    """Least squares through window means; None with samples for fewer than six windows."""
    size = max(1, len(times_s) // WINDOWS)
    starts = range(0, len(times_s) - size + 1, size)
    if len(starts) < 6:
        return None
    x = [fmean(times_s[start : start + size]) for start in starts]
    y = [fmean(values[start : start + size]) for start in starts]
    slope, intercept = linear_regression(x, y)
    freedom = len(x) - 2
    residual = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    centre = fmean(x)
    spread = sum((a - centre) ** 2 for a in x)
    margin = student_t((1 + CONFIDENCE) / 2, freedom) * math.sqrt(residual / freedom / spread)
    return Slope(slope, slope - margin, slope + margin, len(times_s))


def student_t(share: float, freedom: int) -> float:
    """Quantile of Student's t, by the expansion of Abramowitz and Stegun 26.7.5.

    The error is below 1% for four or more degrees of freedom at the usual quantiles.
    """
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(freedom) ** (power + 1) for power, term in enumerate(terms))
