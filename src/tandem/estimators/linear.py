"""A linear time model that is fitted while it is used.

Recursive least squares with forgetting over relative errors, from sensible first values. Knows
neither devices nor plans. Invariant: every coefficient is above 0, so more work is never predicted
to be cheaper; and every model reports its own error.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.estimators.errors import RelativeErrors

_FORGETTING = 0.995
# One stalled iteration may not ruin the fit: a sample counts as at most this multiple of what was
# expected (and at least its inverse). Several in a row, of those with the same features, are no
# accident: what they have in common is fitted anew.
_CLIP = 1.5
_PATIENCE_SAMPLES = 4
UNKNOWN = 100.0
MEASURED = 0.04
_LEAST = 1e-4  # of the first value: no work is free
_NOTHING_S = 1e-12
_FLOOR = 1e-3  # what is fitted anew counts as at least this
_MAX_VARIANCE = 1e6


class LinearModel:
    """Seconds = coefficients x features, with coefficients that follow the samples; `errors` are
    those of its predictions."""

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
        # Surprises in a row, by which features they had. The first sample may be far from a guess.
        self._surprises: dict[tuple[bool, ...], int] = {}
        self._first = _PATIENCE_SAMPLES - 1 if variance >= UNKNOWN else 0
        self._believed = (False,) * len(initial)
        self.errors = RelativeErrors()

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for this much work."""
        return _dot(self.coefficients, features)

    def observe(self, features: Sequence[float], seconds: float, pace: float = 1.0) -> float | None:
        """Learn from one executed piece of work; what took no time says nothing.

        Returns how many times as long as predicted it took, None for no time. That `pace` times the
        prediction was expected counts for `errors`, and where coefficients are fitted anew.
        """
        if seconds <= 0.0:
            return None
        predicted = max(self.predict(features), 1e-9)
        observed = seconds / predicted
        self.errors.count(pace * predicted, seconds)
        believed = self._believable(predicted, seconds, features)
        if believed is None:
            # What the pace explains already stays its own.
            observed, believed = pace, seconds / pace
            self._blame(features, believed)
        # Relative to what is expected, so that short and long iterations count alike.
        x = [s * f / predicted for s, f in zip(self._scale, features, strict=True)]
        gain = [_dot(row, x) for row in self._covariance]
        divisor = _FORGETTING + _dot(x, gain)
        step = (believed / predicted - _dot(self._theta, x)) / divisor
        self._theta = [max(_LEAST, t + g * step) for t, g in zip(self._theta, gain, strict=True)]
        # Forgetting must not inflate what the samples say nothing about.
        spread = sum(row[place] for place, row in enumerate(self._covariance))
        keep = _FORGETTING if spread < _MAX_VARIANCE else 1.0
        self._covariance = [
            [(value - g * h / divisor) / keep for value, h in zip(row, gain, strict=True)]
            for row, g in zip(self._covariance, gain, strict=True)
        ]
        self.coefficients = tuple([t * s for t, s in zip(self._theta, self._scale, strict=True)])
        return observed

    def _believable(
        self, predicted: float, seconds: float, features: Sequence[float]
    ) -> float | None:
        """What a sample counts as; None if it is a surprise too many, and what they have in common
        is to be fitted anew."""
        kind = _kind(features)
        near = min(max(seconds, predicted / _CLIP), predicted * _CLIP)
        if near == seconds:
            self._first = 0
            self._believed = kind
            for other in [each for each in self._surprises if _within(each, kind)]:
                del self._surprises[other]
            return seconds
        if kind not in self._surprises:  # what was believed before may be over
            self._believed = (False,) * len(kind)
        count = self._surprises.get(kind, self._first) + 1
        self._first = 0
        self._surprises[kind] = count
        return near if count < _PATIENCE_SAMPLES else None

    def _blame(self, features: Sequence[float], seconds: float) -> None:
        """Let a sample's features explain its time, all in the same proportion.

        What was no part of it keeps its coefficient; so does what was part of the last sample that
        was no surprise, if the others alone can explain this one. A coefficient that is too high
        would hardly ever be observed again, since work that seems dear is not planned.
        """
        kind = _kind(features)
        theta = [max(each, _FLOOR) for each in self._theta]
        parts = [t * s * f for t, s, f in zip(theta, self._scale, features, strict=True)]
        blamed = [here and not fine for here, fine in zip(kind, self._believed, strict=True)]
        others_s = sum([part for part, here in zip(parts, blamed, strict=True) if not here])
        if not any(blamed) or others_s >= seconds:
            blamed, others_s = list(kind), 0.0
        blamed_s = sum([part for part, here in zip(parts, blamed, strict=True) if here])
        if blamed_s < _NOTHING_S:  # so little of anything explains no time
            return
        ratio = (seconds - others_s) / blamed_s
        self._theta = [
            max(_LEAST, new * ratio) if here else old
            for new, old, here in zip(theta, self._theta, blamed, strict=True)
        ]
        # In units of the new level, so that what is learned next is not bound to the old one.
        level = max([_FLOOR, *(t for t, here in zip(self._theta, blamed, strict=True) if here)])
        places = range(len(blamed))
        self._covariance = [
            [
                self._variance * level**2 * (row == column)
                if blamed[row] or blamed[column]
                else self._covariance[row][column]
                for column in places
            ]
            for row in places
        ]


def _kind(features: Sequence[float]) -> tuple[bool, ...]:
    """Which features a sample has."""
    return tuple([feature != 0.0 for feature in features])


def _within(kind: Sequence[bool], other: Sequence[bool]) -> bool:
    """Whether a sample of `other` has all the features of `kind`."""
    return all(there or not here for here, there in zip(kind, other, strict=True))


def _identity(size: int, value: float) -> list[list[float]]:
    return [[value if row == column else 0.0 for column in range(size)] for row in range(size)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(left, right, strict=True)])
