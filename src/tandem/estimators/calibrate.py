"""Rates from micro-benchmarks: least squares over relative errors, no coefficient below 0.

Pure arithmetic over samples; who runs them is `executor/profile`. Samples are split by kind and
number, so that errors are reported on passes that the fit has not seen. Invariant: equal samples
give equal rates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeVar

from tandem.core.plan import KeptLayers
from tandem.estimators.latency import Rates
from tandem.estimators.profile import NO_CACHES, NOTHING_KEPT, Caches, FitError, KeptShare
from tandem.estimators.terms import FORWARD_TERMS, features, slice_features
from tandem.estimators.work import BackwardWork, PassWork

T = TypeVar("T")

# Every so-manyth sample of a kind is held out.
_HOLD_OUT = 5
_RHOS = tuple(step / 10 for step in range(11))
_ROUNDS = 4  # which of prefill and decode takes longer depends on the coefficients
_SWEEPS = 400
# A coefficient that the samples do not need keeps this much of its guess.
_LEAST = 1e-6
_RIDGE = 1e-6
_ROUGH_RIDGE = 1e-3
# Of the way to warm caches, what a pass may leave.
_SHARES = tuple(step / 50 for step in range(46))
_TINY = 1e-12


class TimedPass(NamedTuple):
    """A pass, what it took, and what the one before it took (infinite: the caches were cold)."""

    work: PassWork
    seconds: float
    before_s: float = math.inf


@dataclass(slots=True)
class Samples:
    """What was measured, in seconds: passes, slices (of what, layers) and updates. `repeats` are
    times of one pass and of the same again, `streaks` of decodes that ran so many times in a row
    in an engine's loop, `warm_prompts` of prompts right after these, `resumes` of prompts after a
    sleep; `kept` is what passes kept that recorded alone or beside others."""

    passes: list[TimedPass] = field(default_factory=list)
    slices: list[tuple[BackwardWork, int, float]] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    resumes: list[TimedPass] = field(default_factory=list)
    warm_prompts: list[TimedPass] = field(default_factory=list)
    repeats: list[tuple[float, float]] = field(default_factory=list)
    streaks: list[tuple[TimedPass, ...]] = field(default_factory=list)
    kept: list[tuple[bool, KeptLayers]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fit:
    """`errors` and relative residuals (`noise`) by kind of work, on held-out samples; `caches` is
    what sleeps cost and passes in a row save. `repeat` is the error of a pass's time as the
    prediction of the same pass right after it: about 1.4 times the device's own unrest from one
    pass to the next, which no prediction can know."""

    rates: Rates
    errors: dict[str, FitError]
    noise: dict[str, tuple[float, ...]]
    caches: Caches = NO_CACHES
    repeat: FitError | None = None
    kept_alone: KeptShare = NOTHING_KEPT
    kept_beside: KeptShare = NOTHING_KEPT


def fit(samples: Samples, guess: Rates) -> Fit:
    """Rates for `samples`; where there are none of a kind, those of `guess`."""
    known, unseen = _split(samples.passes, lambda each: kind_of(each.work))
    forward, rho = _fit_passes(known, guess) if known else (guess.forward, guess.rho)
    pieces, unseen_pieces = _split(samples.slices, lambda each: "slice")
    slices = guess.slices
    if pieces:
        rows = [slice_features(work, layers) for work, layers, _ in pieces]
        slices = _least_squares(rows, [seconds for *_, seconds in pieces], guess.slices)
    update_s = sorted(samples.updates)[len(samples.updates) // 2] if samples.updates else 0.0
    update_s = update_s or guess.update_s
    rates = Rates(forward, slices, update_s, rho, bool(known), bool(pieces))

    def predict(each: TimedPass) -> float:
        return _dot(forward, features(each.work, each.before_s, forward, rho))

    noise: dict[str, list[float]] = {}
    for each in unseen:
        residual = each.seconds / predict(each) - 1.0
        for kind in ("pass", kind_of(each.work)):
            noise.setdefault(kind, []).append(residual)
    errors = {
        kind: error
        for kind, member in KINDS.items()
        if (error := _error([(predict(u), u.seconds) for u in unseen if member(u.work)]))
        is not None
    }
    backward = [(_dot(slices, slice_features(r, n)), s) for r, n, s in unseen_pieces]
    if backward:
        noise["slice"] = [seconds / predicted - 1.0 for predicted, seconds in backward]
    if (error := _error(backward)) is not None:
        errors["slice"] = error
    residuals = {kind: tuple(sorted(values)) for kind, values in noise.items()}
    repeat, kept = _error(samples.repeats), _kept(samples.kept)
    return Fit(rates, errors, residuals, _caches(samples, predict), repeat, *kept)


def rough(samples: Samples, guess: Rates) -> Rates:
    """Rates for few passes: `guess`, pulled to them; all that they do not show in the proportion in
    which rows take longer or shorter than guessed."""
    known = [each for each in samples.passes if each.work.tokens and each.seconds > 0.0]
    if not known:
        return guess
    times = [each.seconds for each in known]
    rows = [features(each.work, each.before_s, guess.forward, 1.0) for each in known]
    factor = median([s / _dot(guess.forward, x) for x, s in zip(rows, times, strict=True)])
    near = tuple([factor * value for value in guess.forward])
    forward = list(_least_squares(rows, times, near, few=True))
    row = FORWARD_TERMS.index("row")
    factor = forward[row] / guess.forward[row]
    for place in range(FORWARD_TERMS.index("scored"), FORWARD_TERMS.index("cold")):
        forward[place] = factor * guess.forward[place]
    slices = tuple([factor * value for value in guess.slices])
    return Rates(tuple(forward), slices, guess.update_s, 1.0)


KINDS: dict[str, Callable[[PassWork], bool]] = {
    "pass": lambda work: True,
    "decode": lambda work: not work.rows,
    "prefill": lambda work: bool(work.rows) and not work.decodes and not work.recorded,
    "mixed": lambda work: bool(work.rows) and bool(work.decodes) and not work.recorded,
    "training": lambda work: bool(work.recorded),
}


def kind_of(work: PassWork) -> str:
    """The one of `KINDS`, but `pass`, that a pass with rows belongs to."""
    return next(kind for kind, is_of in KINDS.items() if kind != "pass" and is_of(work))


def _fit_passes(known: Sequence[TimedPass], guess: Rates) -> tuple[tuple[float, ...], float]:
    """The coefficients and the rho of the least mean relative error."""
    best, best_error = (guess.forward, guess.rho), float("inf")
    times = [each.seconds for each in known]

    def rows_by(coefficients: tuple[float, ...], rho: float) -> list[tuple[float, ...]]:
        return [features(each.work, each.before_s, coefficients, rho) for each in known]

    for rho in _RHOS:
        coefficients = guess.forward
        for _ in range(_ROUNDS if rho < 1.0 else 1):
            coefficients = _least_squares(rows_by(coefficients, rho), times, guess.forward)
        rows = rows_by(coefficients, rho)
        error = sum(abs(_dot(coefficients, x) / t - 1.0) for x, t in zip(rows, times, strict=True))
        if error < best_error:
            best, best_error = (coefficients, rho), error
    return best


def _least_squares(
    rows: Sequence[Sequence[float]],
    times: Sequence[float],
    guess: Sequence[float],
    *,
    few: bool = False,
) -> tuple[float, ...]:
    """Minimise the squared relative errors by coordinate descent, in units of the guess.

    A little pull towards the guess decides what samples do not. It is relative to what they say of
    a coefficient, so that a guess may be far off; where they are few they say too little for that.
    """
    size = len(guess)
    scaled = [
        [scale * x / seconds for scale, x in zip(guess, row, strict=True)]
        for row, seconds in zip(rows, times, strict=True)
    ]
    gram = [[sum([x[i] * x[j] for x in scaled]) for j in range(size)] for i in range(size)]
    target = [sum([x[i] for x in scaled]) for i in range(size)]
    for place in range(size):
        known = max(gram[place][place], _LEAST * len(scaled))
        pull = _ROUGH_RIDGE * len(scaled) if few else _RIDGE * known
        gram[place][place] += pull
        target[place] += pull
    theta = [1.0] * size
    for _ in range(_SWEEPS):
        for place in range(size):
            row = gram[place]
            others = _dot(row, theta) - row[place] * theta[place]
            theta[place] = max(_LEAST, (target[place] - others) / row[place])
    return tuple(value * scale for value, scale in zip(theta, guess, strict=True))


def _split(samples: Sequence[T], kind: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Those to fit and those held out, the same share of each kind; all of them twice if there are
    too few to divide."""
    if len(samples) < 4 * _HOLD_OUT:
        return list(samples), list(samples)
    known: list[T] = []
    unseen: list[T] = []
    met = Counter[str]()
    for each in samples:
        name = kind(each)
        met[name] += 1  # the first of a kind are to be fitted
        (known if met[name] % _HOLD_OUT else unseen).append(each)
    return known, unseen


def _caches(samples: Samples, predict: Callable[[TimedPass], float]) -> Caches:
    """Medians of what was measured less what the rates say, or the other way round; never below
    0. A streak ends before caches are as warm as they get: what is missing is added."""

    def over(found: Sequence[TimedPass]) -> list[float]:
        return [each.seconds - predict(each) for each in found]

    # The first of a streak comes after other work; what the others find falls as their times do.
    streaks = [[each.seconds for each in streak[1:]] for streak in samples.streaks]
    share, reached = _share_left(streaks) if streaks else (0.0, 1.0)
    return Caches(
        resume_s=max(0.0, _median(over(samples.resumes))),
        decode_s=max(0.0, -_median(over([streak[-1] for streak in samples.streaks]))) / reached,
        prompt_s=max(0.0, -_median(over(samples.warm_prompts))) / reached,
        cold_share=share,
    )


def _share_left(streaks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """What share of the way to warm caches each pass leaves, by the curve with one such share that
    is nearest to the median streak; and what share of the way the streak has gone."""
    columns = zip(*[[each - times[-1] for each in times] for times in streaks], strict=True)
    above = [_median(column) for column in columns]

    def misfit(share: float) -> float:
        powers = [math.pow(share, place) for place in range(len(above))]
        shape = [each - powers[-1] for each in powers]
        height = _dot(shape, above) / max(_dot(shape, shape), _TINY)
        gaps = [height * x - y for x, y in zip(shape, above, strict=True)]
        return _dot(gaps, gaps)

    share = min(_SHARES, key=misfit)
    return share, 1.0 - math.pow(share, len(above))


def _kept(found: Sequence[tuple[bool, KeptLayers]]) -> tuple[KeptShare, KeptShare]:
    """Mean shares of layers that passes kept wholly and in part: those alone, those beside; of the
    others where there are none of a kind."""
    means = []
    for wanted in (True, False):
        some = [kept for alone, kept in found if alone is wanted] or [kept for _, kept in found]
        count = max(1, len(some))
        whole, inner = sum([each.whole for each in some]), sum([each.inner for each in some])
        means.append((whole / count, inner / count))
    return means[0], means[1]


def _error(pairs: Sequence[tuple[float, float]]) -> FitError | None:
    return FitError.of([predicted / seconds - 1.0 for predicted, seconds in pairs])


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(left, right, strict=True)])
