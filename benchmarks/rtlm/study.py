"""What is run: RT-LM's comparisons (V-B to V-G) as series of runs on one device.

Knows how the parts are made up, not what is said of them. Invariant: within a part, all policies
get the same loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

from benchmarks.rtlm.load import (
    MALICIOUS,
    SUBSETS,
    apart,
    foreseen,
    subset,
    tau_of,
    with_malicious,
)
from benchmarks.rtlm.runs import BATCHING, Beside, Case, Device, Run
from tandem.bench.answers import Answer, arrival
from tandem.cli.tune import ALPHAS, GATHERS
from tandem.engine.placement import Above, Overflow

SHARES = tuple(round(0.1 * tenth, 1) for tenth in range(11))
UNIFIED = "unified"
PERFECT = "rt_lm, perfect forecasts"

Variant = tuple[str, str, dict[str, str]]
"""A label, the policy, and its options."""

OVERFLOW = {" + overflow 50%": 0.5, " + overflow 25%": 0.25}
"""Shares of the device that the overflow engine has: one core of two, and of four."""
RECENT = " + overflow 50%, recent tau"

ABLATION: tuple[Variant, ...] = (
    ("FIFO", "fifo", {}),
    ("UP", "rt_lm", {"consolidate": "false"}),
    ("UP, equation 2", "rt_lm", {"consolidate": "false", "slack": "true"}),
    ("UP, as printed", "rt_lm", {"consolidate": "false", "literal": "true"}),
    ("UP+C", "rt_lm", {}),
    *((f"UP+C{engines}", "rt_lm", {}) for engines in OVERFLOW),
)


def tables(device: Device, tasks: Sequence[Answer], busy: float, seed: int) -> Iterator[Run]:
    """Tables III and IV, figures 9 and 11; and what `rt_lm` would do with perfect forecasts."""
    for name in SUBSETS:
        load = device.load(subset(tasks, name), busy, seed)
        known = device.load(foreseen(subset(tasks, name)), busy, seed)
        for static in (True, False):
            for policy in (*BATCHING, *(() if static else (UNIFIED,))):
                case = Case("tables", name, busy, seed, policy, static)
                yield device.run(case, load, policy, {})
            case = Case("tables", name, busy, seed, PERFECT, static)
            yield device.run(case, known, "rt_lm", {})


def ablation(device: Device, tasks: Sequence[Answer], busy: float, seed: int) -> Iterator[Run]:
    """Figures 10 and 12. All have the same device; with offloading two engines share it."""
    chosen = subset(tasks, "large")
    load = device.load(chosen, busy, seed)
    for static in (True, False):
        for label, policy, options in ABLATION:
            case = Case("ablation", "large", busy, seed, label, static)
            beside = _beside(label.removeprefix("UP+C"), tau_of(chosen))
            yield device.run(case, load, policy, options, beside=beside)


def parameters(device: Device, tasks: Sequence[Answer], busy: float, seed: int) -> Iterator[Run]:
    """Figure 13: `alpha` with `gather` at 2, then `gather` with `alpha` at 1."""
    load = device.load(subset(tasks, "large"), busy, seed)
    for name, places, rest in (
        ("alpha", ALPHAS, {"gather": "2.0"}),
        ("gather", GATHERS, {"alpha": "1.0"}),
    ):
        for place in places:
            case = Case("parameters", name, busy, seed, f"{place:g}", True)
            yield device.run(case, load, "rt_lm", {name: str(place), **rest})


def malicious(device: Device, tasks: Sequence[Answer], busy: float, seed: int) -> Iterator[Run]:
    """Figure 14: response times of benign tasks. Tasks come at the times at which `busy` is the
    load of benign ones."""
    for share in SHARES[:-1]:
        rng = Random(seed)
        at_s = device.times(apart(tasks)[0], busy, rng)
        chosen = with_malicious(tasks, share, len(at_s), rng)
        load = [arrival(task, place, at_s[place]) for place, (task, _) in enumerate(chosen)]
        benign = {f"task-{place}" for place, (_, bad) in enumerate(chosen) if not bad}
        for policy, static, engines in attacked():
            case = Case("malicious", f"{share:.0%}", busy, seed, policy + engines, static)
            beside = _beside(engines, tau_of(tasks))
            yield device.run(case, load, policy, {}, beside=beside).only(benign)


def overhead(device: Device, tasks: Sequence[Answer], busy: float, seed: int) -> Iterator[Run]:
    """Scheduling of each policy, every iteration by itself (table VII)."""
    load = device.load(tasks, busy, seed)[:400]
    for static in (True, False):
        for policy in (*BATCHING, *(() if static else (UNIFIED,))):
            case = Case("overhead", "normal", busy, seed, policy, static)
            yield device.run(case, load, policy, {}, timed=True)


def attacked() -> Iterable[tuple[str, bool, str]]:
    """Policy, kind of batches, and engines."""
    for static in (True, False):
        for policy in ("fifo", "luf"):
            yield policy, static, ""
        for engines in ("", *OVERFLOW):
            yield "rt_lm", static, engines
    yield "rt_lm", False, RECENT
    for engines in ("", *OVERFLOW):
        yield UNIFIED, False, engines


def _beside(engines: str, tau: float) -> Beside | None:
    if engines == RECENT:
        return Beside(Overflow(MALICIOUS), 0.5)
    return Beside(Above(tau), OVERFLOW[engines]) if engines in OVERFLOW else None
