"""A linear time model that is fitted while it is used.

Recursive least squares with forgetting over relative errors, from sensible first values. Knows
neither devices nor plans. Invariant: every coefficient is above 0, so more work is never predicted
to be cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.estimators.errors import RelativeErrors

_FORGETTING = 0.995
# One stalled iteration must not spoil the fit: a sample counts as at most `_CLIP` times the
# prediction, and at least its inverse. Several such samples in a row with the same features are no
# accident. Then the coefficients of these features are fitted anew.
_CLIP = 1.5
_PATIENCE_SAMPLES = 4
UNKNOWN = 100.0
MEASURED = 0.04
_LEAST = 1e-4  # share of the first value; no work is free
_NOTHING_S = 1e-12
_FLOOR = 1e-3  # lower bound for coefficients that are fitted anew
_MAX_VARIANCE = 1e6


class LinearModel:
    """Seconds = coefficients x features, with coefficients that follow the samples. `errors` are
    the errors of its predictions."""

    def __init__(self, initial: Sequence[float], variance: float = UNKNOWN) -> None:
        """`initial` coefficients: seconds per unit of each feature, above 0.

        `variance` is how far off they may be, as the square of a relative error: `UNKNOWN` for
        guesses, `MEASURED` for measurements on this device.
        """
        assert initial and all(value > 0.0 for value in initial)
        self._scale = tuple(initial)
        self._variance = variance
        self._theta = [1.0] * len(initial)  # in units of the initial coefficients
        # Seconds per unit of each feature.
        self.coefficients = self._scale
        self._covariance = _identity(len(initial), variance)
        # Implausible samples in a row, by their features. The first sample may be far from a guess.
        self._surprises: dict[tuple[bool, ...], int] = {}
        self._first = _PATIENCE_SAMPLES - 1 if variance >= UNKNOWN else 0
        self._believed = (False,) * len(initial)
        self.errors = RelativeErrors()

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for this much work."""
        return dot(self.coefficients, features)

    def observe(self, features: Sequence[float], seconds: float, pace: float = 1.0) -> float | None:
        """Learn from one executed piece of work. A piece that took no time is ignored.

        Returns the observed time relative to the prediction (None: no time). `pace` times the
        prediction was expected. That counts for `errors`, and where coefficients are fitted anew.
        """
        if seconds <= 0.0:
            return None
        predicted = max(self.predict(features), 1e-9)
        observed = seconds / predicted
        self.errors.count(pace * predicted, seconds)
        believed = self._believable(predicted, seconds, features)
        if believed is None:
            # The part that the pace explains is not attributed to coefficients.
            observed, believed = pace, seconds / pace
            self._blame(features, believed)
        # Relative to the prediction, so short and long iterations have the same weight.
        x = [s * f / predicted for s, f in zip(self._scale, features, strict=True)]
        gain = [dot(row, x) for row in self._covariance]
        divisor = _FORGETTING + dot(x, gain)
        step = (believed / predicted - dot(self._theta, x)) / divisor
        self._theta = [max(_LEAST, t + g * step) for t, g in zip(self._theta, gain, strict=True)]
        # Forgetting must not inflate the variance of features that the samples do not have.
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
        """The time that a sample counts as. None after too many implausible samples in a row: then
        the coefficients of their features are fitted anew."""
        kind = _kind(features)
        near = min(max(seconds, predicted / _CLIP), predicted * _CLIP)
        if near == seconds:
            self._first = 0
            self._believed = kind
            for other in [each for each in self._surprises if _within(each, kind)]:
                del self._surprises[other]
            return seconds
        if kind not in self._surprises:  # earlier samples may no longer hold
            self._believed = (False,) * len(kind)
        count = self._surprises.get(kind, self._first) + 1
        self._first = 0
        self._surprises[kind] = count
        return near if count < _PATIENCE_SAMPLES else None

    def _blame(self, features: Sequence[float], seconds: float) -> None:
        """Scale the coefficients of a sample's features so that they explain its time.

        Features that the sample lacks keep their coefficients. So do features of the last plausible
        sample, if the others alone can explain this one. Otherwise a coefficient that is too high
        would seldom be observed again, since work that seems expensive is not planned.
        """
        kind = _kind(features)
        theta = [max(each, _FLOOR) for each in self._theta]
        parts = [t * s * f for t, s, f in zip(theta, self._scale, features, strict=True)]
        blamed = [here and not fine for here, fine in zip(kind, self._believed, strict=True)]
        others_s = sum([part for part, here in zip(parts, blamed, strict=True) if not here])
        if not any(blamed) or others_s >= seconds:
            blamed, others_s = list(kind), 0.0
        blamed_s = sum([part for part, here in zip(parts, blamed, strict=True) if here])
        if blamed_s < _NOTHING_S:  # too little work to explain any time
            return
        ratio = (seconds - others_s) / blamed_s
        self._theta = [
            max(_LEAST, new * ratio) if here else old
            for new, old, here in zip(theta, self._theta, blamed, strict=True)
        ]
        # In units of the new level, so later samples are not bound to the old one.
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
    """Which features a sample has: those that are not 0."""
    return tuple([feature != 0.0 for feature in features])


def _within(kind: Sequence[bool], other: Sequence[bool]) -> bool:
    """Whether a sample of `other` has all the features of `kind`."""
    return all(there or not here for here, there in zip(kind, other, strict=True))


def _identity(size: int, value: float) -> list[list[float]]:
    return [[value if row == column else 0.0 for column in range(size)] for row in range(size)]


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    """The scalar product."""
    return sum([a * b for a, b in zip(left, right, strict=True)])
