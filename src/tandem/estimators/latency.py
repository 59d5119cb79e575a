"""How long an iteration will take: linear in its work, fitted while serving.

Recursive least squares with forgetting over relative errors, from sensible first values. Learns
from every executed plan; knows no device and no policy. Invariant: every coefficient is above 0, so
more work is never predicted to be cheaper; and every model reports its own error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tandem.core.plan import LanePlan, StepResult

# Starting values: a small machine that streams weights and multiplies at these rates.
_BYTES_PER_S = 20e9
_FLOPS_PER_S = 5e11
_OVERHEAD_S = 2e-3
_UPDATE_S = 2e-2
_TOKEN_S = 5e-5  # at least
# A backward slice recomputes its layers and multiplies by the weights once more.
_BACKWARD_FACTOR = 3.0

_FORGETTING = 0.99
_ERROR_DECAY = 0.05
# One stalled iteration may not ruin the fit: a sample counts as at most this multiple of what was
# expected (and at least its inverse). Several in a row are no accident: the fit begins anew.
_CLIP = 3.0
_PATIENCE_SAMPLES = 4
_VARIANCE = 1e4
# Of iterations that decode as many sequences as the one before, so many in a row teach nothing.
_MOST_SKIPPED = 3
_LEAST = 1e-4  # of the first value: no work is free
_MAX_VARIANCE = 1e6


class LinearModel:
    """Seconds = coefficients x features, with coefficients that follow the samples.

    `bias` is the mean of (predicted - observed) / observed and `error` that of its absolute value,
    over about the last twenty samples; nan before the first.
    """

    def __init__(self, initial: Sequence[float]) -> None:
        """`initial` coefficients: seconds a unit of each feature, above 0."""
        assert initial and all(value > 0.0 for value in initial)
        self._scale = tuple(initial)
        self._theta = [1.0] * len(initial)  # in units of the initial coefficients
        self._covariance = _identity(len(initial), _VARIANCE)
        self._surprises = _PATIENCE_SAMPLES - 1  # the first sample may be far from anything
        self.samples = 0
        self.bias = math.nan
        self.error = math.nan

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds a unit of each feature."""
        return tuple(t * s for t, s in zip(self._theta, self._scale, strict=True))

    def predict(self, features: Sequence[float]) -> float:
        """Seconds for this much work."""
        total = 0.0
        for theta, scale, feature in zip(self._theta, self._scale, features, strict=True):
            total += theta * scale * feature
        return total

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one executed piece of work; what took no time says nothing."""
        if seconds <= 0.0:
            return
        predicted = max(self.predict(features), 1e-9)
        self._count_error(predicted, seconds)
        seconds = self._believable(predicted, seconds)
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

    def _believable(self, predicted: float, seconds: float) -> float:
        """What a sample counts as; forgets everything after too many surprises in a row."""
        near = min(max(seconds, predicted / _CLIP), predicted * _CLIP)
        if near == seconds:
            self._surprises = 0
            return seconds
        self._surprises += 1
        if self._surprises < _PATIENCE_SAMPLES:
            return near
        # In units of the new level, so that what is learned next is not bound to the old one.
        self._theta = [max(theta, 1e-3) * seconds / predicted for theta in self._theta]
        self._covariance = _identity(len(self._theta), _VARIANCE * max(self._theta) ** 2)
        return seconds

    def _count_error(self, predicted: float, seconds: float) -> None:
        relative = (predicted - seconds) / seconds
        self.samples += 1
        if self.samples == 1:
            self.bias, self.error = relative, abs(relative)
            return
        self.bias += _ERROR_DECAY * (relative - self.bias)
        self.error += _ERROR_DECAY * (abs(relative) - self.error)


class LatencyModel:
    """Predicted seconds of forwards, backward slices and updates on one lane.

    `forward`, `backward` and `update` are the fitted models, for those who report their errors.
    """

    def __init__(self, *, weight_bytes: int, num_parameters: int, num_layers: int) -> None:
        """Numbers of the served model; they set the first predictions only."""
        token_s = max(2.0 * num_parameters / _FLOPS_PER_S, _TOKEN_S)
        layer_s = _BACKWARD_FACTOR * token_s / max(1, num_layers)
        # An iteration; each row; each row through the head, drawn or scored; 1000 tokens of KV;
        # a pass that records; each row that is recorded.
        self.forward = LinearModel(
            (
                _OVERHEAD_S + weight_bytes / _BYTES_PER_S,
                token_s,
                token_s / 4,
                token_s / 4,
                token_s,
                _OVERHEAD_S,
                token_s / 4,
            )
        )
        self.backward = LinearModel((_OVERHEAD_S / 2, layer_s))
        self.update = LinearModel((_UPDATE_S,))
        self._usual_rows = 0
        self._skipped = 0

    @property
    def uncertainty(self) -> float:
        """By what share a pass lately took longer or shorter than predicted; 0 at first."""
        return 0.0 if math.isnan(self.forward.error) else self.forward.error

    @property
    def token_s(self) -> float:
        """Seconds that one more training row adds to a pass: recorded, scored, with little KV."""
        coefficients = self.forward.coefficients
        return coefficients[1] + coefficients[3] + coefficients[6]

    @property
    def pass_s(self) -> float:
        """Seconds of a pass before its first row."""
        return self.forward.coefficients[0]

    @property
    def recording_s(self) -> float:
        """Seconds that recording adds to a pass before its first recorded row."""
        return self.forward.coefficients[5]

    def forward_s(
        self, tokens: int, draws: int, scored: int, context_tokens: int, recorded: int = 0
    ) -> float:
        """A pass over `tokens` rows: `draws` are sampled from, `scored` scored, `recorded` kept.

        `context_tokens` is the KV that it reads, summed over its sequences.
        """
        if tokens == 0:
            return 0.0
        return self.forward.predict(_features(tokens, draws, scored, context_tokens, recorded))

    def slice_s(self, tokens: int, layers: int) -> float:
        """A backward slice of `layers` layers over a micro-batch of `tokens` recorded rows."""
        return self.backward.predict((1.0, tokens * layers)) if layers else 0.0

    def layers_within(self, tokens: int, seconds: float) -> int:
        """How many layers of a micro-batch of `tokens` rows a slice of `seconds` can have."""
        fixed, each = self.backward.coefficients
        if seconds <= fixed:
            return 0
        return int(min((seconds - fixed) / max(each * tokens, 1e-9), 1e6) + 1e-9)

    def update_s(self) -> float:
        """An optimiser step."""
        return self.update.predict((1.0,))

    def observe(self, lane: LanePlan, result: StepResult, rows: Callable[[int], int]) -> None:
        """A lane was executed; `rows` tells the recorded rows of a micro-batch (0: unknown)."""
        tokens = lane.num_tokens
        if self._routine(lane, tokens):
            return
        beside = sum([piece.elapsed_s for piece in result.slices])
        beside += sum([update.elapsed_s for update in result.updates])
        self.observe_forward(
            tokens,
            sum([len(span.draws) for span in lane.spans]),
            sum([len(span.score_targets) for span in lane.spans]),
            sum([span.start + len(span.tokens) for span in lane.spans]),
            result.forward_s or result.elapsed_s - beside,
            sum([len(span.tokens) for span in lane.spans if span.record]),
        )
        for piece in result.slices:
            recorded = rows(piece.micro_batch)
            if piece.problem is None and recorded:
                self.observe_slice(recorded, piece.hi - piece.lo, piece.elapsed_s)
        for update in result.updates:
            self.observe_update(update.elapsed_s)

    def _routine(self, lane: LanePlan, tokens: int) -> bool:
        """Whether a plan is too much like the last ones to be worth the time to learn from it."""
        decodes = tokens == len(lane.spans) and not (lane.slices or lane.updates)
        usual = decodes and tokens == self._usual_rows
        self._usual_rows = tokens if decodes else 0
        self._skipped = self._skipped + 1 if usual and self._skipped < _MOST_SKIPPED else 0
        return self._skipped > 0

    def observe_forward(
        self,
        tokens: int,
        draws: int,
        scored: int,
        context_tokens: int,
        seconds: float,
        recorded: int = 0,
    ) -> None:
        """A pass took `seconds`."""
        if tokens:
            features = _features(tokens, draws, scored, context_tokens, recorded)
            self.forward.observe(features, seconds)

    def observe_slice(self, tokens: int, layers: int, seconds: float) -> None:
        """A backward slice took `seconds`."""
        self.backward.observe((1.0, tokens * layers), seconds)

    def observe_update(self, seconds: float) -> None:
        """An optimiser step took `seconds`."""
        self.update.observe((1.0,), seconds)


def _features(
    tokens: int, draws: int, scored: int, context_tokens: int, recorded: int
) -> tuple[float, ...]:
    records = 1.0 if recorded else 0.0
    return (1.0, tokens, draws, scored, context_tokens / 1000, records, recorded)


def _identity(size: int, value: float) -> list[list[float]]:
    return [[value if row == column else 0.0 for column in range(size)] for row in range(size)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(left, right, strict=True)])
