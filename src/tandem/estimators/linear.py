"""A linear time model that is fitted while it is used.

Recursive least squares with forgetting over relative errors, from sensible first values. Knows
neither devices nor plans. Invariant: every coefficient is above 0, so more work is never predicted
to be cheaper; and every model reports its own error.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

_FORGETTING = 0.995
_ERROR_DECAY = 0.05
# Samples whose errors are kept for `p95`.
_WINDOW = 256
# One stalled iteration may not ruin the fit: a sample counts as at most this multiple of what was
# expected (and at least its inverse). Several in a row, of those with the same features, are no
# accident: what they have in common is fitted anew.
_CLIP = 1.5
_PATIENCE_SAMPLES = 4
UNKNOWN = 100.0
MEASURED = 0.04
_LEAST = 1e-4  # of the first value: no work is free
_MAX_VARIANCE = 1e6


class LinearModel:
    """Seconds = coefficients x features, with coefficients that follow the samples.

    `bias` is the mean of (predicted - observed) / observed and `error` that of its absolute value,
    over about the last twenty samples; nan before the first.
    """

    def __init__(self, initial: Sequence[float], variance: float = UNKNOWN) -> None:
        """`initial` coefficients: seconds a unit of each feature, above 0.

        `variance` is how far off they may be, as the square of a factor less one: `UNKNOWN` for
        guesses, `MEASURED` for what was measured on this device.
        """
        assert initial and all(value > 0.0 for value in initial)
        self._scale = tuple(initial)
        self._variance = variance
        self._theta = [1.0] * len(initial)  # in units of the initial coefficients
        # Seconds a unit of each feature.
        self.coefficients = self._scale
        self._covariance = _identity(len(initial), variance)
        self._surprises = _PATIENCE_SAMPLES - 1  # the first sample may be far from anything
        self._surprising = self._believed = [False] * len(initial)
        self._errors: deque[float] = deque(maxlen=_WINDOW)
        self.samples = 0
        self.bias = math.nan
        self.error = math.nan

    @property
    def p95(self) -> float:
        """What 95% of the absolute relative errors lately were at most; nan before the first."""
        if not self._errors:
            return math.nan
        ordered = sorted(self._errors)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for this much work."""
        return _dot(self.coefficients, features)

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one executed piece of work; what took no time says nothing."""
        if seconds <= 0.0:
            return
        predicted = max(self.predict(features), 1e-9)
        self._count_error(predicted, seconds)
        seconds = self._believable(predicted, seconds, features)
        # Relative to what is expected, so that short and long iterations count alike.
        x = [s * f / predicted for s, f in zip(self._scale, features, strict=True)]
        gain = [_dot(row, x) for row in self._covariance]
        divisor = _FORGETTING + _dot(x, gain)
        step = (seconds / predicted - _dot(self._theta, x)) / divisor
        self._theta = [max(_LEAST, t + g * step) for t, g in zip(self._theta, gain, strict=True)]
        # Forgetting must not inflate what the samples say nothing about.
        spread = sum(row[place] for place, row in enumerate(self._covariance))
        keep = _FORGETTING if spread < _MAX_VARIANCE else 1.0
        self._covariance = [
            [(value - g * h / divisor) / keep for value, h in zip(row, gain, strict=True)]
            for row, g in zip(self._covariance, gain, strict=True)
        ]
        self.coefficients = tuple([t * s for t, s in zip(self._theta, self._scale, strict=True)])

    def _believable(self, predicted: float, seconds: float, features: Sequence[float]) -> float:
        """What a sample counts as; forgets what was surprising too many times in a row."""
        present = [feature != 0.0 for feature in features]
        near = min(max(seconds, predicted / _CLIP), predicted * _CLIP)
        if near == seconds:
            self._believed = present
            if all(
                here or not before for here, before in zip(present, self._surprising, strict=True)
            ):
                self._surprises = 0
            return seconds
        self._surprises += 1
        self._surprising = present
        if self._surprises < _PATIENCE_SAMPLES:
            return near
        # What was no part of the surprise keeps its coefficient, and so does what was part of the
        # last sample that was none: what is too high would hardly ever be observed again, since
        # work that seems dear is not planned.
        suspects = [here and not fine for here, fine in zip(present, self._believed, strict=True)]
        if not any(suspects):
            suspects = present
        parts = [c * f for c, f in zip(self.coefficients, features, strict=True)]
        blamed_s = sum([part for part, suspect in zip(parts, suspects, strict=True) if suspect])
        ratio = max(seconds - (predicted - blamed_s), _LEAST * seconds) / max(blamed_s, 1e-9)
        self._theta = [
            max(theta, 1e-3) * ratio if suspect else theta
            for theta, suspect in zip(self._theta, suspects, strict=True)
        ]
        self._forget(suspects)
        return seconds

    def _forget(self, suspects: Sequence[bool]) -> None:
        """What is learned next is not bound to the old level; variances are in units of the new."""
        places = range(len(suspects))
        level = (
            self._variance * max([self._theta[place] for place in places if suspects[place]]) ** 2
        )
        self._covariance = [
            [
                self._covariance[row][column]
                if not (suspects[row] or suspects[column])
                else level * (row == column)
                for column in places
            ]
            for row in places
        ]

    def _count_error(self, predicted: float, seconds: float) -> None:
        relative = (predicted - seconds) / seconds
        self._errors.append(abs(relative))
        self.samples += 1
        if self.samples == 1:
            self.bias, self.error = relative, abs(relative)
            return
        self.bias += _ERROR_DECAY * (relative - self.bias)
        self.error += _ERROR_DECAY * (abs(relative) - self.error)


def _identity(size: int, value: float) -> list[list[float]]:
    return [[value if row == column else 0.0 for column in range(size)] for row in range(size)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(left, right, strict=True)])
