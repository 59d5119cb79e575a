"""Rates from micro-benchmarks: least squares over relative errors, no coefficient below 0.

Pure arithmetic over samples; `executor/profile` measures them. Samples are split by kind and
number, so errors are reported on passes that the fit has not seen. Invariant: equal samples give
equal rates.
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
from tandem.estimators.linear import dot
from tandem.estimators.profile import NO_CACHES, NOTHING_KEPT, Caches, FitError, KeptShare
from tandem.estimators.terms import FORWARD_TERMS, features, slice_features
from tandem.estimators.work import BackwardWork, PassWork

T = TypeVar("T")

# Every fifth sample of a kind is held out.
_HOLD_OUT = 5
_RHOS = tuple(step / 10 for step in range(11))
_ROUNDS = 4  # which part takes longer depends on the coefficients
_SWEEPS = 400
# A coefficient that the samples do not need keeps this much of its guess.
_LEAST = 1e-6
_RIDGE = 1e-6
_ROUGH_RIDGE = 1e-3
# Candidates for `Caches.cold_share`.
_SHARES = tuple(step / 50 for step in range(46))
_TINY = 1e-12


class TimedPass(NamedTuple):
    """A pass, its seconds, and the seconds of the pass before it (infinite: caches were cold)."""

    work: PassWork
    seconds: float
    before_s: float = math.inf


@dataclass(slots=True)
class Samples:
    """Measurements. Times are seconds."""

    passes: list[TimedPass] = field(default_factory=list)
    # work, number of layers, time
    slices: list[tuple[BackwardWork, int, float]] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    resumes: list[TimedPass] = field(default_factory=list)  # prompts after a sleep
    warm_prompts: list[TimedPass] = field(default_factory=list)  # prompts right after a streak
    # times of a pass and of the same pass again
    repeats: list[tuple[float, float]] = field(default_factory=list)
    # successive decodes in an engine's loop
    streaks: list[tuple[TimedPass, ...]] = field(default_factory=list)
    # Whether a pass recorded alone, and what it kept.
    kept: list[tuple[bool, KeptLayers]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fit:
    """Rates and how good they are."""

    rates: Rates
    errors: dict[str, FitError]  # by kind of work, on held-out samples
    noise: dict[str, tuple[float, ...]]  # relative residuals by kind, held out too
    caches: Caches = NO_CACHES  # cost of sleeps and savings of successive passes
    # Error of a pass's time as a prediction of the same pass right after it. It is about 1.4 times
    # the device's own variation between passes, which no prediction can know.
    repeat: FitError | None = None
    kept_alone: KeptShare = NOTHING_KEPT  # passes that only record
    kept_beside: KeptShare = NOTHING_KEPT  # passes that record beside requests


def fit(samples: Samples, guess: Rates) -> Fit:
    """Rates for `samples`. A kind without samples keeps the rates of `guess`."""
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
        return dot(forward, features(each.work, each.before_s, forward, rho))

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
    backward = [(dot(slices, slice_features(r, n)), s) for r, n, s in unseen_pieces]
    if backward:
        noise["slice"] = [seconds / predicted - 1.0 for predicted, seconds in backward]
    if (error := _error(backward)) is not None:
        errors["slice"] = error
    residuals = {kind: tuple(sorted(values)) for kind, values in noise.items()}
    repeat, kept = _error(samples.repeats), _kept(samples.kept)
    return Fit(rates, errors, residuals, _caches(samples, predict), repeat, *kept)


def rough(samples: Samples, guess: Rates) -> Rates:
    """Rates for few passes: `guess`, corrected by them. Coefficients that the passes do not show
    are scaled by how much longer or shorter rows take than guessed."""
    known = [each for each in samples.passes if each.work.tokens and each.seconds > 0.0]
    if not known:
        return guess
    times = [each.seconds for each in known]
    rows = [features(each.work, each.before_s, guess.forward, 1.0) for each in known]
    factor = median([s / dot(guess.forward, x) for x, s in zip(rows, times, strict=True)])
    near = tuple([factor * value for value in guess.forward])
    forward = list(_least_squares(rows, times, near, few=True))
    row = FORWARD_TERMS.index("row")
    factor = forward[row] / guess.forward[row]
    for place in range(FORWARD_TERMS.index("scored"), FORWARD_TERMS.index("cold")):
        forward[place] = factor * guess.forward[place]
    forward[FORWARD_TERMS.index("recording")] = forward[0]  # as in `guess`: as much as a pass
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
    """The kind of a pass with rows: a key of `KINDS` other than `pass`."""
    return next(kind for kind, is_of in KINDS.items() if kind != "pass" and is_of(work))


def _fit_passes(known: Sequence[TimedPass], guess: Rates) -> tuple[tuple[float, ...], float]:
    """The coefficients and the rho with the least mean relative error."""
    best, best_error = (guess.forward, guess.rho), float("inf")
    times = [each.seconds for each in known]

    def rows_by(coefficients: tuple[float, ...], rho: float) -> list[tuple[float, ...]]:
        return [features(each.work, each.before_s, coefficients, rho) for each in known]

    for rho in _RHOS:
        coefficients = guess.forward
        for _ in range(_ROUNDS if rho < 1.0 else 1):
            coefficients = _least_squares(rows_by(coefficients, rho), times, guess.forward)
        rows = rows_by(coefficients, rho)
        error = sum(abs(dot(coefficients, x) / t - 1.0) for x, t in zip(rows, times, strict=True))
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

    A weak pull to the guess decides what the samples do not. The pull is relative to what samples
    say about a coefficient, so a guess may be far off. With `few` samples, which say too little for
    that, it is stronger.
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
            others = dot(row, theta) - row[place] * theta[place]
            theta[place] = max(_LEAST, (target[place] - others) / row[place])
    return tuple(value * scale for value, scale in zip(theta, guess, strict=True))


def _split(samples: Sequence[T], kind: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Samples to fit and held-out samples, in the same ratio for each kind. With too few samples
    both are all of them."""
    if len(samples) < 4 * _HOLD_OUT:
        return list(samples), list(samples)
    known: list[T] = []
    unseen: list[T] = []
    met = Counter[str]()
    for each in samples:
        name = kind(each)
        met[name] += 1  # the first of a kind are for the fit
        (known if met[name] % _HOLD_OUT else unseen).append(each)
    return known, unseen


def _caches(samples: Samples, predict: Callable[[TimedPass], float]) -> Caches:
    """Medians of the difference between measurements and rates, never below 0. A streak ends before
    caches are as warm as possible, so the missing part is added."""

    def over(found: Sequence[TimedPass]) -> list[float]:
        return [each.seconds - predict(each) for each in found]

    # The first of a streak comes after other work. The rest shows how times fall.
    streaks = [[each.seconds for each in streak[1:]] for streak in samples.streaks]
    share, reached = _share_left(streaks) if streaks else (0.0, 1.0)
    return Caches(
        resume_s=max(0.0, _median(over(samples.resumes))),
        decode_s=max(0.0, -_median(over([streak[-1] for streak in samples.streaks]))) / reached,
        prompt_s=max(0.0, -_median(over(samples.warm_prompts))) / reached,
        cold_share=share,
    )


def _share_left(streaks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Share of the remaining way to warm caches that each pass leaves (a geometric curve, fitted to
    the median streak), and the share of the way that the streak has covered."""
    columns = zip(*[[each - times[-1] for each in times] for times in streaks], strict=True)
    above = [_median(column) for column in columns]

    def misfit(share: float) -> float:
        powers = [math.pow(share, place) for place in range(len(above))]
        shape = [each - powers[-1] for each in powers]
        height = dot(shape, above) / max(dot(shape, shape), _TINY)
        gaps = [height * x - y for x, y in zip(shape, above, strict=True)]
        return dot(gaps, gaps)

    share = min(_SHARES, key=misfit)
    return share, 1.0 - math.pow(share, len(above))


def _kept(found: Sequence[tuple[bool, KeptLayers]]) -> tuple[KeptShare, KeptShare]:
    """Mean shares of layers that passes kept whole and in part: passes that record alone, then
    those beside requests. A kind without samples takes those of the other."""
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
