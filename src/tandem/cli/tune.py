"""`tandem profile --tune`: RT-LM's constants for the answers of a file, by simulation (V-A, V-F).

phi and eta follow from the answers. The batch size C, the weight `alpha` and the factor `gather`
(b) are searched one after the other, as in the paper's parameter study: what makes the mean
response time least is kept. Invariant: the same profile, answers and options give the same
constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from rich.table import Table

from tandem.bench.answers import BETAS, Answer, arrivals, times
from tandem.build import build_simulation
from tandem.config import Settings
from tandem.core.clock import VirtualClock
from tandem.core.errors import InvalidRequest
from tandem.core.events import ModelInfo
from tandem.estimators.batching import Batching, fit_batching
from tandem.estimators.profile import Profile
from tandem.sim.run import Arrival, Simulation

ALPHAS = tuple(round(0.1 * tenth, 1) for tenth in range(21))
GATHERS = tuple(round(0.1 * tenth, 1) for tenth in range(10, 31))
_SIZES = (0.5, 0.75, 1.0, 1.5, 2.0)  # of C, relative to full use of the device
_ALPHA, _GATHER = 1.0, 2.0  # while they are not searched yet
_BUSY = 0.5  # mean load, relative to what a full batch of average answers serves
_SEEDS = 2


@dataclass(frozen=True, slots=True)
class Tried:
    """One place of the search: constants, and the mean response time."""

    searched: str
    batching: Batching
    mean_s: float


def unit_s(batching: Batching, answers: Sequence[Answer], busy: float) -> float:
    """The paper's second, so that the mean load is `busy` times what a full batch serves."""
    served = 60.0 * batching.batch / (batching.eta * fmean(each.output_tokens for each in answers))
    return fmean(BETAS) / (busy * served)


def fitting(answers: Sequence[Answer], info: ModelInfo) -> list[Answer]:
    """The answers that can run to their end with this model and cache."""
    most = min(info.max_model_len, info.num_blocks * info.block_size)
    return [each for each in answers if each.input_tokens + each.output_tokens <= most]


def tune(
    profile: Profile,
    settings: Settings,
    answers: Sequence[Answer],
    on_progress: Callable[[float], None] = lambda done: None,
) -> tuple[Batching, list[Tried]]:
    """The best constants, and all that was tried. Options of the policy that are not searched are
    those of `settings`. Raises `InvalidRequest` if one is wrong, or if an answer does not fit (see
    `fitting`)."""
    lengths = [(each.input_tokens, each.output_tokens) for each in answers]
    fitted = fit_batching(profile.rates, profile.host_s, lengths)
    scale_s = unit_s(fitted, answers, _BUSY)
    loads = [_load(answers, scale_s, Random(seed)) for seed in range(_SEEDS)]
    most = settings.scheduling.max_sequences
    sizes = sorted({min(most, max(1, round(factor * fitted.batch))) for factor in _SIZES})
    total = len(sizes) + len(ALPHAS) + len(GATHERS)
    searches: dict[str, Callable[[Batching], list[Batching]]] = {
        "batch": lambda _: [
            replace(
                fit_batching(profile.rates, profile.host_s, lengths, size),
                alpha=_ALPHA,
                gather=_GATHER,
            )
            for size in sizes
        ],
        "alpha": lambda best: [replace(best, alpha=each) for each in ALPHAS],
        "gather": lambda best: [replace(best, gather=each) for each in GATHERS],
    }
    best, tried = fitted, list[Tried]()
    for searched, candidates in searches.items():
        found = list[Tried]()
        for batching in candidates(best):
            mean_s = fmean(_response_s(profile, settings, batching, load) for load in loads)
            found.append(Tried(searched, batching, mean_s))
            on_progress((len(tried) + len(found)) / total)
        best = min(found, key=lambda each: each.mean_s).batching
        tried += found
    return best, tried


def table_of(tried: Sequence[Tried]) -> Table:
    """A row a place of the search, the best of each constant marked."""
    table = Table("constant", "value", "mean response (s)", "")
    for searched in dict.fromkeys(each.searched for each in tried):
        found = [each for each in tried if each.searched == searched]
        best = min(found, key=lambda each: each.mean_s)
        for each in found:
            value = each.batching.options[searched]
            table.add_row(searched, value, f"{each.mean_s:.3f}", "best" if each is best else "")
    return table


def _load(answers: Sequence[Answer], scale_s: float, rng: Random) -> list[Arrival]:
    return arrivals(answers, times(scale_s, rng), rng)


def _response_s(
    profile: Profile, settings: Settings, batching: Batching, load: list[Arrival]
) -> float:
    """Mean seconds from arrival to the last token. Raises `InvalidRequest` if a request failed."""
    scheduling = settings.scheduling
    options = {**scheduling.policy_options, **batching.options}
    settings = replace(
        settings, scheduling=replace(scheduling, policy="rt_lm", policy_options=options)
    )
    clock = VirtualClock()
    loop, executor = build_simulation(settings, profile, clock, noise=False)
    report = Simulation(loop, clock, load, leaps=executor).run()
    for each in report.outcomes.values():
        if not each.finished:
            raise InvalidRequest(
                f"{each.request_id} cannot be simulated: {each.error or 'cut off'}"
            )
    return fmean(each.last_s - each.arrival_s for each in report.outcomes.values())
