"""How long an iteration will take: Echo's forms (5.2), corrected, and fitted while serving.

    prefill = alpha * pairs + beta * rows
    decode  = constant + gamma * longest + delta * mean + terms in the number and in all KV read
    pass    = max(prefill, decode) + rho * min(prefill, decode) + draws, scores, recordings
              + cold * b / (b + 20 ms), where b is the time of the pass before
    slice   = constant + layers * (1 + rows + pairs + sequences), more for layers whose forward is
              recomputed, + first slice
    update  = constant

`constant` is the time to stream the weights once. With rho = 0 a pass of one prompt takes
`max(alpha l^2 + beta l, c)` as in the paper; rho = 1 adds both sides. `cold` is the extra time to
read weights that have left the caches: the longer the pass before, the more of them have.

Learns from executed plans (from one in eight if they only repeat the same decodes): slowly how
long each part takes, and quickly the `pace`, by which a busy machine is slower at everything. Knows
no device and no policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tandem.core.events import ModelInfo, PredictionError
from tandem.core.plan import LanePlan, StepResult
from tandem.estimators.linear import MEASURED, UNKNOWN, LinearModel
from tandem.estimators.terms import coldness, joined, slice_features
from tandem.estimators.work import BackwardWork, PassWork

_DECODE_TERMS = 5  # the first of `FORWARD_TERMS`

# First guesses: a small machine that streams weights and multiplies at these rates.
_BYTES_PER_S = 20e9
_FLOPS_PER_S = 5e11
_OVERHEAD_S = 2e-3
_MOST_ROWS = 1e9
_UPDATE_S = 2e-2
_TOKEN_S = 5e-5  # lower bound
# Time of a layer's backward relative to its forward: products with the weights and of the adapters.
# `_REST_FACTOR` is for the part that kernels do not keep.
_BACKWARD_FACTOR = 2.0
_BACKWARD_PAIRS_FACTOR = 2.5  # backward attention has five products, forward attention two
_REST_FACTOR = 0.4
# Terms that are small on most devices, as a share of similar ones.
_SMALL = 0.05

# Of iterations that decode as many sequences as the one before, so many in a row are skipped.
_MOST_SKIPPED = 7
# Number of backward slices after which the rates are no longer guesses.
_ENOUGH_SLICES = 30
# The pace follows about the last ten pieces of work. A piece counts as at most `_MOST_PACE` times
# its prediction, and at least the inverse. The first samples of a kind correct its coefficients
# instead, relative to the pace of the other kinds.
_PACE_GAIN = 0.1
_MOST_PACE = 1.5
_SETTLED_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class Rates:
    """Coefficients in seconds."""

    forward: tuple[float, ...]  # of `FORWARD_TERMS`
    slices: tuple[float, ...]  # of `SLICE_TERMS`
    update_s: float
    rho: float = 1.0  # part of a mixed pass's smaller side that does not overlap
    measured: bool = False  # `forward` was measured on the device that it is used for
    slices_measured: bool = False  # `slices` was measured there

    @staticmethod
    def guess_for(info: ModelInfo) -> Rates:
        """`guess` for a loaded model."""
        return Rates.guess(
            weight_bytes=info.weight_bytes,
            num_parameters=info.num_parameters,
            num_layers=info.num_layers,
        )

    @staticmethod
    def guess(*, weight_bytes: int, num_parameters: int, num_layers: int) -> Rates:
        """First values for a model of this size on an unknown device."""
        token_s = max(2.0 * num_parameters / _FLOPS_PER_S, _TOKEN_S)
        again_s = token_s / max(1, num_layers)
        layer_s = _BACKWARD_FACTOR * again_s
        stream_s = weight_bytes / _BYTES_PER_S / max(1, num_layers)
        # A layer has about 12 width^2 parameters; keys and values are as wide as half the model.
        width = math.sqrt(max(1.0, num_parameters / (12.0 * max(1, num_layers))))
        pairs_s = token_s * 1e6 / (6.0 * width)
        layer_pairs_s = pairs_s / max(1, num_layers)
        kv_bytes = width * num_layers * weight_bytes / max(1, num_parameters)
        context_s = max(1e3 * kv_bytes / _BYTES_PER_S, 1e-9)
        pass_s = _OVERHEAD_S + weight_bytes / _BYTES_PER_S
        return Rates(
            forward=(
                pass_s,
                token_s,
                context_s,
                _SMALL * context_s,
                _SMALL * context_s,
                token_s,
                pairs_s,
                token_s / 4,
                token_s / 4,
                pass_s,
                token_s / 4,
                _SMALL * _OVERHEAD_S,
                _SMALL * token_s,
                _SMALL * _OVERHEAD_S,
            ),
            slices=(
                _OVERHEAD_S / 2,
                stream_s + _SMALL * layer_s,
                layer_s,
                _BACKWARD_PAIRS_FACTOR * layer_pairs_s,
                _SMALL * _OVERHEAD_S,
                stream_s + _SMALL * again_s,
                again_s,
                layer_pairs_s,
                _REST_FACTOR * again_s,
                _OVERHEAD_S / 2,
                again_s,
            ),
            update_s=_UPDATE_S,
        )


class LatencyModel:
    """Predicted seconds of forwards, backward slices and updates on one lane.

    `forward`, `backward` and `update` are the fitted models; callers read their errors. Each
    prediction is for the next pass. The first pass counts as one with cold caches.
    """

    def __init__(self, rates: Rates) -> None:
        variance = MEASURED if rates.measured else UNKNOWN
        slice_variance = MEASURED if rates.slices_measured else UNKNOWN
        self._slices_measured = rates.slices_measured
        # Total, longest and mean context rise together. They are corrected as one term, in their
        # initial proportions.
        self._kv = tuple([each / rates.forward[2] for each in rates.forward[2:_DECODE_TERMS]])
        self._kv_each = sum(self._kv) / 1e3  # for one decode, all three are its context
        forward = (*rates.forward[:3], *rates.forward[_DECODE_TERMS:])
        self.forward = LinearModel(forward, variance)
        self.backward = LinearModel(rates.slices, slice_variance)
        self.update = LinearModel((rates.update_s,), slice_variance)
        self._rho = rates.rho
        self._untimed: dict[tuple[int, int], BackwardWork] = {}  # by recording and upper layer
        self._pace = 1.0
        self._cold = 1.0
        self._usual_rows = 0
        self._skipped = 0

    @property
    def rates(self) -> Rates:
        """The current coefficients."""
        found = self.forward.coefficients
        forward = (*found[:2], *[found[2] * part for part in self._kv], *found[3:])
        backward = self.backward.coefficients
        return Rates(forward, backward, self.update.coefficients[0], self._rho, True, True)

    @property
    def uncertainty(self) -> float:
        """Mean relative error of recent passes, as an absolute value; 0 at first."""
        error = self.forward.errors.mean
        return 0.0 if math.isnan(error) else error

    @property
    def guessed(self) -> bool:
        """Whether the cost of learning was neither measured nor observed often enough."""
        return not self._slices_measured and self.backward.errors.samples < _ENOUGH_SLICES

    def errors(self) -> dict[str, PredictionError]:
        """Prediction errors by kind of work."""
        models = {"forward": self.forward, "slice": self.backward, "update": self.update}
        return {kind: model.errors.report() for kind, model in models.items()}

    def forward_s(self, work: PassWork) -> float:
        """Seconds of a pass; 0 without rows."""
        return self._work_s(work) if work.tokens else 0.0

    def added_s(self, work: PassWork) -> float:
        """Seconds that `work` adds to a pass that runs in any case."""
        return self.forward_s(work) - self._empty_s()

    def added_decode_s(self, context: int) -> float:
        """Seconds that one decode after `context` tokens adds to a pass that runs in any case."""
        coefficients = self.forward.coefficients
        each = coefficients[1] + coefficients[2] * self._kv_each * context + coefficients[5]
        return self._pace * each

    def slice_s(self, work: BackwardWork, layers: int) -> float:
        """Seconds of a backward slice of `layers` layers of a recording."""
        return self._pace * self.backward.predict(slice_features(work, layers)) if layers else 0.0

    def layers_within(self, work: BackwardWork, seconds: float) -> int:
        """How many layers of a recording fit into a slice of `seconds`."""
        one, two = self.slice_s(work, 1), self.slice_s(work, 2)
        each = two - one
        fixed = one - each
        if seconds <= fixed:
            return 0
        return int(min((seconds - fixed) / max(each, 1e-9), 1e6) + 1e-9)

    def recording_rows_within(self, seconds: float) -> int:
        """Most rows of a recording of which one layer (not its first) takes at most `seconds`; may
        be 0.

        The rows count as one sequence. Several sequences attend to less, and each adds a little.
        """

        def layer_s(rows: int) -> float:
            return self.slice_s(BackwardWork.of((rows,), begun=True), 1)

        one, two, three = layer_s(1), layer_s(2), layer_s(3)
        if seconds < one:
            return 0
        # A parabola through the three points. This form of its root has no 0 / 0 if it is a line.
        half = max(0.0, three - 2.0 * two + one) / 2.0
        slope, left_s = max(two - one - half, 1e-12), seconds - one
        more = 2.0 * left_s / (slope + math.sqrt(slope * slope + 4.0 * half * left_s))
        return int(min(1.0 + more, _MOST_ROWS))

    def update_s(self) -> float:
        """Seconds of an optimiser step."""
        return self._pace * self.update.predict((1.0,))

    def observe(
        self, lane: LanePlan, result: StepResult, backward: Callable[[int], BackwardWork | None]
    ) -> None:
        """Learn from an executed lane. `backward` gives the work of a recording (None: unknown)."""
        beside_s = result.backward_s - sum([piece.elapsed_s for piece in result.timed])
        forward_s = result.forward_s or result.elapsed_s - beside_s
        for piece in result.timed:
            work = self._untimed.pop((piece.micro_batch, piece.hi), None)
            if work is not None:
                self.observe_slice(work, piece.hi - piece.lo, piece.elapsed_s)
        self._untimed.clear()
        if not self._routine(lane):
            self._learn(lane, result, forward_s, backward)
        if lane.spans:
            self.after(forward_s)

    def after(self, seconds: float) -> None:
        """The last pass took `seconds`, which decides how cold the caches are. Learns nothing
        else."""
        if seconds > 0.0:
            self._cold = coldness(seconds)

    def observe_decodes(self, work: PassWork, seconds: float) -> None:
        """Like `observe`, for a plan that only decodes."""
        if self._usual(work.tokens, decodes=True):
            self.after(seconds)
        else:
            self.observe_forward(work, seconds)

    def observe_forward(self, work: PassWork, seconds: float) -> None:
        """Learn from a pass that took `seconds`."""
        if work.tokens:
            self._follow(self.forward, self._features(work), seconds)
            self.after(seconds)

    def observe_slice(self, work: BackwardWork, layers: int, seconds: float) -> None:
        """Learn from a backward slice that took `seconds`."""
        self._follow(self.backward, slice_features(work, layers), seconds)

    def observe_update(self, seconds: float) -> None:
        """Learn from an optimiser step that took `seconds`."""
        self.update.observe((1.0,), seconds / self._pace)

    def _follow(self, model: LinearModel, features: tuple[float, ...], seconds: float) -> None:
        """Learn from a pass or a slice: coefficients, and the pace of all work."""
        if model.errors.samples < _SETTLED_SAMPLES:
            model.observe(features, seconds / self._pace)
            return
        took = model.observe(features, seconds, self._pace)
        if took is not None:
            took = min(max(took, 1.0 / _MOST_PACE), _MOST_PACE)
            self._pace *= (took / self._pace) ** _PACE_GAIN

    def _learn(
        self,
        lane: LanePlan,
        result: StepResult,
        forward_s: float,
        backward: Callable[[int], BackwardWork | None],
    ) -> None:
        if not result.stopped:
            self.observe_forward(PassWork.of(lane), forward_s)
        for piece in result.slices:
            work = backward(piece.micro_batch)
            if piece.problem is not None or work is None:
                continue
            if math.isnan(piece.elapsed_s):
                self._untimed[piece.micro_batch, piece.hi] = work
            else:
                self.observe_slice(work, piece.hi - piece.lo, piece.elapsed_s)
        for update in result.updates:
            self.observe_update(update.elapsed_s)

    def _empty_s(self) -> float:
        """Seconds of a pass without work."""
        fixed, *_, cold = self.forward.coefficients
        return self._pace * (fixed + cold * self._cold)

    def _routine(self, lane: LanePlan) -> bool:
        """Whether a plan is too similar to the last ones to be worth learning from."""
        tokens = lane.num_tokens
        decodes = tokens == len(lane.spans) and not (lane.slices or lane.updates)
        return self._usual(tokens, decodes=decodes)

    def _usual(self, tokens: int, *, decodes: bool) -> bool:
        usual = decodes and tokens == self._usual_rows
        self._usual_rows = tokens if decodes else 0
        self._skipped = self._skipped + 1 if usual and self._skipped < _MOST_SKIPPED else 0
        return self._skipped > 0

    def _work_s(self, work: PassWork) -> float:
        """Seconds of `work`: the result of `forward.predict` at the present pace, without making
        the features. Policies call this often."""
        (
            fixed, decode, context, row, pairs, draw, scored, recording, recorded, whole, whole_row,
            cold,
        ) = self.forward.coefficients  # fmt: skip
        total, longest, average = self._kv
        mean = work.context / work.decodes if work.decodes else 0.0
        kv = total * (work.context + work.prefix) + longest * work.longest + average * mean
        decode_s = fixed + decode * work.decodes + context * kv / 1e3
        prefill_s = row * work.rows + pairs * work.pairs / 1e6
        longer, shorter = (prefill_s, decode_s) if prefill_s > decode_s else (decode_s, prefill_s)
        beside_s = draw * work.draws + scored * work.scored + cold * self._cold
        if work.recorded:
            beside_s += recording + recorded * work.recorded
        if work.whole:
            beside_s += whole + whole_row * work.recorded
        return self._pace * (longer + self._rho * shorter + beside_s)

    def _features(self, work: PassWork) -> tuple[float, ...]:
        mean = work.context / work.decodes if work.decodes else 0.0
        total, longest, average = self._kv
        read = work.context + work.prefix
        kv = (total * read + longest * work.longest + average * mean) / 1e3
        decode = (1.0, work.decodes, kv)
        return joined(decode, work, self._cold, self.forward.coefficients, self._rho)
