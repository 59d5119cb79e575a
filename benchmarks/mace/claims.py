"""What MACE's paper claims, judged on our figures, with the reason where it does not come out.

A claim is judged where the paper makes it: on its devices, which are simulated, at the rate or over
the loads that it names, and at every retrain rate if it names none. Invariant: a reason is said of
figures that it quotes, and every claim that does not hold has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from benchmarks.mace.measured import Measured
from benchmarks.mace.overhead import Overhead
from benchmarks.mace.runs import Figures, Scale, objective
from tandem.estimators.latency import LatencyModel
from tandem.estimators.profile import Profile

# Figures this much apart are equal: `unified` as good as `mace`.
_TOLERANCE = 0.005
_ABLATIONS = ("mace", "mace/bin", "mace/prefix")


@dataclass(frozen=True, slots=True)
class Results:
    """All of one scale: by retrain rate (figures 5, 10, 11), by load (12), in order of arrival
    (13), and what scheduling costs (table 1). `measured` if it was not simulated; `runs` has all
    rounds of each row, by part."""

    scale: Scale
    profile: Profile
    rates: list[Figures]
    loads: list[Figures]
    fifo: list[Figures] = field(default_factory=list)
    overheads: list[Overhead] = field(default_factory=list)
    measured: Measured | None = None
    runs: dict[str, list[list[Figures]]] = field(default_factory=dict)

    @property
    def retrain_rates(self) -> list[float]:
        """Those with retraining, in order."""
        return sorted({row.retrain_rate for row in self.rates} - {0.0})

    @property
    def request_rates(self) -> list[float]:
        """Of the sweep, in order."""
        return sorted({row.request_rate for row in self.loads})

    def at_rate(self, variant: str, retrain_rate: float) -> Figures:
        """Of the comparison by retrain rate."""
        return _only(self.rates, variant, lambda row: row.retrain_rate == retrain_rate)

    def at_load(self, variant: str, request_rate: float) -> Figures:
        """Of the comparison by load."""
        return _only(self.loads, variant, lambda row: row.request_rate == request_rate)


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that the paper says, and what came out here; `reason` says why it does not hold."""

    text: str
    paper: str
    found: str
    holds: bool
    reason: str = ""


def claims(results: Results) -> list[Claim]:
    """MACE's claims (6.2, 6.3, table 1) for this scale, and `unified` beside `mace`; none of what
    was measured on another device."""
    if results.measured is not None:
        return []
    rates = results.retrain_rates
    found: list[Claim] = []
    if results.scale.name == "edge":
        found.append(_cut(results, "tbt_s", "decode latency (TBT)", 0.30))
        found.append(_throughput(results, rates, 1.12, "over adainf's, on average"))
    else:
        found.append(_cut(results, "ttft_s", "prefill latency (TTFT)", 0.63))
        found.append(_throughput(results, [0.1], 1.46, "over adainf's at 10%"))
    found.append(_bins(results))
    if results.fifo:
        found.append(_fifo(results))
    found += _overheads(results)
    figures = {"ttft_s": -1, "tbt_s": -1, "throughput": 1, "attainment": 1}
    found += [_unified(results, *each) for each in figures.items()]
    return [replace(claim, reason="") if claim.holds else claim for claim in found]


def _cut(results: Results, name: str, text: str, least: float) -> Claim:
    """6.2 names no retrain rate, so it has to hold at every one ("up to", says the abstract)."""
    rates = results.retrain_rates
    none = getattr(results.at_rate("adainf", 0.0), name)
    theirs = {rate: getattr(results.at_rate("adainf", rate), name) for rate in rates}
    ours = {rate: getattr(results.at_rate("mace", rate), name) for rate in rates}
    cuts = {rate: 1.0 - ours[rate] / theirs[rate] for rate in rates}
    missed = [rate for rate in rates if not cuts[rate] >= least]  # nan: nobody got that far
    beyond = [rate for rate in missed if 1.0 - none / theirs[rate] < least]
    others = [rate for rate in missed if rate not in beyond]
    reason = ""
    if beyond:
        most = _list(f"{1.0 - none / theirs[rate]:.0%}" for rate in beyond)
        reason += (
            f"Without any training it is {_ms(none)} ms, and adainf's {_mss(theirs, beyond)} ms at "
            f"{_rates(beyond)}: {most} below is all that could be had there. "
        )
    if others:
        long = {rate: results.at_rate("mace", rate).iteration_s for rate in others}
        reason += (
            f"At {_rates(others)} `mace` takes {_mss(ours, others)} ms, adainf "
            f"{_mss(theirs, others)} ms: beside answers a step runs as a whole, and iterations of "
            f"`mace` take {_mss(long, others)} ms on average "
            f"({_ms(results.at_rate('mace', 0.0).iteration_s)} ms without training). "
        )
    if name == "tbt_s":
        reason += "The paper has it from pruning the cache (6.2), which is not built here. "
    if missed and len(missed) < len(rates):
        reached = [rate for rate in rates if rate not in missed]
        reason += f"It is reached at {_rates(reached)}. "
    return Claim(
        f"{text} below adainf's at every retrain rate (the paper names none)",
        f"{least:.0%}",
        ", ".join(f"{cuts[rate]:.0%} at {rate:.0%}" for rate in rates),
        not missed,
        reason.strip(),
    )


def _throughput(results: Results, rates: Sequence[float], least: float, text: str) -> Claim:
    """Of the mean over `rates`."""
    none = results.at_rate("adainf", 0.0).throughput
    theirs = [results.at_rate("adainf", rate).throughput for rate in rates]
    ours = [results.at_rate("mace", rate).throughput for rate in rates]
    ratio = fmean(_over(mine, other) for mine, other in zip(ours, theirs, strict=True))
    most = fmean(_over(none, other) for other in theirs)
    high = results.request_rates[-1]
    by_load = _over(*(results.at_load(name, high).throughput for name in ("mace", "adainf")))
    swept = results.at_load("mace", high).retrain_rate
    reason = (
        f"adainf's {_list(f'{each:.0f}' for each in theirs)} tokens/s at {_rates(rates)} compare "
        f"with {none:.0f} without any training"
    )
    if most < least:
        reason += f", so {most:.2f} times is all that could be had: requests set the rate here"
    else:
        passes = [results.at_rate("mace", rate).iteration_s for rate in rates]
        reason += (
            f"; `mace` gives {_list(f'{each:.0f}' for each in ours)}, in iterations of "
            f"{_list(map(_ms, passes))} ms"
        )
    reason += f". At {high:g} requests/s and a retrain rate of {swept:.0%} it is {by_load:.2f}."
    return Claim(f"throughput {text}", f"{least:g}", f"{ratio:.2f}", ratio >= least, reason)


def _bins(results: Results) -> Claim:
    """Figure 12, left: without bins attainment falls most with load, to below 20%."""
    low, high = results.request_rates[0], results.request_rates[-1]
    first = {name: results.at_load(name, low).attainment for name in _ABLATIONS}
    last = {name: results.at_load(name, high).attainment for name in _ABLATIONS}
    steepest = min(_ABLATIONS, key=lambda name: last[name] - first[name])
    worst = min(_ABLATIONS, key=lambda name: last[name])
    mixed, apart = results.at_load("mace", high), results.at_load("mace/bin", high)
    job_s = results.at_load("adainf", low).fine_tune_s
    latency = LatencyModel(results.profile.rates)
    objective_s = objective(results.scale, latency, results.scale.prompt_tokens).ttft_s
    late = ", and whoever comes during one is late" if job_s > objective_s else ""
    reason = (
        f"A job that goes first takes {_ms(job_s)} ms (adainf, {low:g} requests/s), and five "
        f"forwards of a mean prompt allow {_ms(objective_s)} ms for a first token. `mace` runs "
        f"jobs beside requests as they come, at {high:g} requests/s in iterations of "
        f"{_ms(mixed.iteration_s)} ms on average{late}. Under `mace/bin`, which keeps them apart, "
        f"iterations take {_ms(apart.iteration_s)} ms, a job {apart.fine_tune_s:.1f} s against "
        f"{mixed.fine_tune_s:.1f}, a first token {_ms(apart.ttft_s)} ms against "
        f"{_ms(mixed.ttft_s)} on average, and {last['mace/bin']:.0%} are in time against "
        f"{last['mace']:.0%}."
    )
    return Claim(
        f"without bins attainment declines most over load ({low:g} to {high:g} requests/s)",
        "most, to below 20%",
        "; ".join(f"`{name}` {first[name]:.0%} to {last[name]:.0%}" for name in _ABLATIONS),
        steepest == worst == "mace/bin" and last["mace/bin"] < 0.20,
        reason,
    )


def _fifo(results: Results) -> Claim:
    """Figure 13: as many answers and jobs at once, in order of arrival, mixed or not."""
    rates = sorted({row.retrain_rate for row in results.fifo} - {0.0})
    by = {(row.variant, row.retrain_rate): row for row in results.fifo}
    others = ("ekya", "adainf", "mace/bin")
    fewer, found, reasons = True, [], []
    for rate in rates:
        hybrid = by["mace/fifo", rate]
        least = min((by[name, rate] for name in others), key=lambda row: row.iterations)
        ratio, longer = (
            hybrid.iterations / least.iterations,
            hybrid.iteration_s / least.iteration_s,
        )
        found.append(f"{ratio:.2f} at {rate:.0%}, each {longer:.2f} times as long")
        if hybrid.iterations >= least.iterations:
            fewer = False
            reasons.append(
                f"at {rate:.0%} `{least.variant}` takes {least.iterations} of "
                f"{_ms(least.iteration_s)} ms, the hybrid {hybrid.iterations} of "
                f"{_ms(hybrid.iteration_s)} ms, until {least.last_s:.0f} and "
                f"{hybrid.last_s:.0f} s"
            )
    reason = (
        f"Iterations go on while requests come, so the shorter ones are the more: "
        f"{'; '.join(reasons)}."
    )
    return Claim(
        "in order of arrival, hybrid iterations against the fewest of the others",
        'fewer; times "close" (not judged)',
        "; ".join(found),
        fewer,
        reason,
    )


def _overheads(results: Results) -> list[Claim]:
    """Table 1; nothing if it was not measured."""
    by = {row.variant: row for row in results.overheads}
    if "mace" not in by:
        return []
    mace, adainf, bare = by["mace"], by["adainf"], by["mace/prefix"]
    iteration_s = results.at_rate("mace", 0.0).iteration_s
    time_reason = (
        f"adainf, which only takes what came first, takes {1e3 * adainf.schedule_s:.2f} ms (paper: "
        f"0.08): admission, blocks and results cost every policy, in Python. Of an iteration of "
        f"{_ms(iteration_s)} ms without training, `mace` takes {mace.schedule_s / iteration_s:.1%}."
    )
    space_reason = (
        f"Without prefix sharing (`mace/prefix`) it is {bare.state_bytes / 1e6:.1f} MB: the rest "
        f"is the account of what is cached, in up to {results.profile.info.num_blocks} blocks."
    )
    return [
        Claim(
            "scheduling an iteration under `mace`",
            "0.15 ms",
            f"{1e3 * mace.schedule_s:.2f} ms",
            mace.schedule_s <= 0.15e-3,
            time_reason,
        ),
        Claim(
            "the scheduler's memory under `mace`",
            "below 5 MB",
            f"{mace.state_bytes / 1e6:.1f} MB",
            mace.state_bytes < 5e6,
            space_reason,
        ),
    ]


def _unified(results: Results, name: str, better: int) -> Claim:
    """Not the paper's: `unified` is to be as good at every retrain rate; `better` is the sign."""
    rates = results.retrain_rates
    ours = {rate: results.at_rate("unified", rate) for rate in rates}
    theirs = {rate: results.at_rate("mace", rate) for rate in rates}
    lost = [
        rate
        for rate in rates
        if not better * getattr(ours[rate], name)
        >= better * getattr(theirs[rate], name) * (1.0 - _TOLERANCE * better)
    ]

    reason = " ".join(_beside(rate, ours[rate], theirs[rate]) for rate in lost)
    ended = all(ours[rate].unfinished + theirs[rate].unfinished == 0 for rate in lost)
    waited = all(ours[rate].fine_tune_s > theirs[rate].fine_tune_s for rate in lost)
    if name == "throughput" and ended and waited:
        reason += (
            " All tokens come under both, so throughput says when the last answer ends: under "
            "`unified`, training that is still queued goes on beside the last answers."
        )
    return Claim(
        f"unified at least as good as mace: {name}",
        "-",
        f"at {len(rates) - len(lost)} of {len(rates)} retrain rates",
        not lost,
        reason,
    )


def _beside(rate: float, ours: Figures, theirs: Figures) -> str:
    """The figures of `unified` with those of `mace` in parentheses."""
    return (
        f"At {rate:.0%} its last answer ends after {ours.last_s:.0f} s ({theirs.last_s:.0f}), with "
        f"{_ms(ours.tbt_s)} ms between tokens ({_ms(theirs.tbt_s)}), first tokens after "
        f"{_ms(ours.ttft_s)} ms ({_ms(theirs.ttft_s)}), an attainment of {ours.attainment:.0%} "
        f"({theirs.attainment:.0%}) and {ours.fine_tune_s:.1f} s a job ({theirs.fine_tune_s:.1f})."
    )


def _over(value: float, other: float) -> float:
    return value / other if other else math.nan


def _only(rows: Sequence[Figures], variant: str, chosen: Callable[[Figures], bool]) -> Figures:
    return next(row for row in rows if row.variant == variant and chosen(row))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def _mss(seconds: dict[float, float], rates: Iterable[float]) -> str:
    return _list(_ms(seconds[rate]) for rate in rates)


def _rates(rates: Iterable[float]) -> str:
    return _list(f"{rate:.0%}" for rate in rates)


def _list(texts: Iterable[str]) -> str:
    """One after the other: a, b and c."""
    *others, last = texts
    return f"{', '.join(others)} and {last}" if others else last
