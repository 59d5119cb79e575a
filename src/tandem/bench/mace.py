"""MACE's comparison at the paper's scale, in simulation: policies by retrain rate and by load.

Data-sheet profiles of the paper's devices, Poisson requests with shared beginnings, retraining jobs
as a share of the requests (MACE 6.1). The scheduler, the policies and the cache are the real ones;
times are predictions. Invariant: the same options give the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import fmean

from tandem.bench.measure import percentile
from tandem.core.clock import VirtualClock
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.training import (
    LossKind,
    LossSpec,
    Role,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.engine.loop import EngineLoop
from tandem.estimators.latency import LatencyModel
from tandem.estimators.profile import Profile
from tandem.estimators.work import PassWork
from tandem.sim.run import Arrival, SimOutcome, SimReport, Simulation
from tandem.sim.timeline import Moment, Timeline

# An objective of the paper: five times the forward latency (6.3).
SLO_FACTOR = 5.0


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with its options, under the name that the tables use."""

    name: str
    policy: str
    options: Mapping[str, str] = field(default_factory=dict)
    prefix_caching: bool = True


VARIANTS = (
    Variant("ekya", "ekya", {"interval_s": "10"}),
    Variant("adainf", "adainf"),
    Variant("mace", "mace"),
    Variant("mace/bin", "mace", {"bins": "false"}),
    Variant("mace/prefix", "mace", {"prefix": "false"}, prefix_caching=False),
    Variant("unified", "unified"),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """A device with a model, and the load that it is asked to bear.

    `rate` requests/s for `duration_s`; prompts of `prompt_tokens` on average, of which the first
    `shared_tokens` are one of `templates`; answers of `output_tokens` on average. A retraining job
    is a pair of two sequences of `pair_tokens`, for one of `trainers` adapters.
    """

    name: str
    profile: str
    rate: float
    duration_s: float = 60.0
    prompt_tokens: int = 192
    shared_tokens: int = 96
    templates: int = 8
    output_tokens: int = 96
    pair_tokens: int = 384
    trainers: int = 4


SCALES = (
    Scale("server", "a6000-ada:mistral-7b", rate=12.0),
    Scale("edge", "agx-orin:llama-3.2-3b", rate=2.0, duration_s=120.0),
)
RETRAIN_RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. Latencies in seconds, means unless said; throughput in output tokens a second of
    the time until the last request ended; attainment as shares of requests whose first token came
    within five forward latencies. `fine_tune_s` is from a job's arrival to its update (nan: none
    ended); utilisation is the share of the matrix ceiling."""

    variant: str
    retrain_rate: float
    request_rate: float
    throughput: float
    ttft_s: float
    ttft_p95_s: float
    tbt_s: float
    fine_tune_s: float
    attainment: float
    iterations: int
    iteration_s: float
    utilisation: float
    jobs: int
    jobs_done: int
    unfinished: int


MakeLoop = Callable[[Variant, Profile, VirtualClock, Timeline], EngineLoop]


def run_variant(
    variant: Variant,
    scale: Scale,
    profile: Profile,
    retrain_rate: float,
    make_loop: MakeLoop,
    seed: int = 0,
) -> Figures:
    """Simulate one variant under one load; it may take three times the load's duration."""
    clock = VirtualClock()
    timeline = Timeline(clock.now)
    loop = make_loop(variant, profile, clock, timeline)
    arrivals, jobs = load_of(scale, profile, retrain_rate, seed)
    trainers = [TrainerSpec(f"adapter-{number}") for number in range(scale.trainers)]
    simulation = Simulation(loop, clock, arrivals, trainers)
    report = simulation.run(until_s=3.0 * scale.duration_s)
    return _figures(variant, scale, profile, retrain_rate, report, timeline.moments, jobs)


def load_of(
    scale: Scale, profile: Profile, retrain_rate: float, seed: int
) -> tuple[list[Arrival], int]:
    """Requests and retraining jobs in time, the same for every variant; how many jobs there are."""
    rng = Random(f"{seed}/{scale.name}")
    vocabulary = profile.info.vocab_size
    templates = [
        tuple(rng.choices(range(vocabulary), k=scale.shared_tokens)) for _ in range(scale.templates)
    ]
    arrivals: list[Arrival] = []
    requests, jobs, at_s = 0, 0, 0.0
    while (at_s := at_s + rng.expovariate(scale.rate)) < scale.duration_s:
        own = max(8, round(rng.expovariate(1.0 / (scale.prompt_tokens - scale.shared_tokens))))
        prompt = (*rng.choice(templates), *rng.choices(range(vocabulary), k=own))
        output = max(2, round(rng.expovariate(1.0 / scale.output_tokens)))
        prompt, output = prompt[:2048], min(output, 1024)
        wants_training = rng.random()
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        arrivals.append(Arrival(at_s, Request(f"request-{requests}", prompt, sampling)))
        requests += 1
        if wants_training < retrain_rate:
            arrivals.append(Arrival(at_s, _job(jobs, scale, vocabulary)))
            jobs += 1
    return arrivals, jobs


def _job(number: int, scale: Scale, vocabulary: int) -> TrainingStep:
    rng = Random(f"job/{number}")
    pair = tuple(
        TrainingSequence(
            tuple(rng.choices(range(vocabulary), k=scale.pair_tokens)), scale.pair_tokens // 2, role
        )
        for role in (Role.CHOSEN, Role.REJECTED)
    )
    trainer = f"adapter-{number % scale.trainers}"
    return TrainingStep(f"job-{number}", trainer, LossSpec(LossKind.DPO), (pair,))


def _figures(
    variant: Variant,
    scale: Scale,
    profile: Profile,
    retrain_rate: float,
    report: SimReport,
    moments: Sequence[Moment],
    jobs: int,
) -> Figures:
    outcomes = list(report.outcomes.values())
    ended = [each for each in outcomes if each.output_tokens]
    latency = LatencyModel(profile.rates)
    last_s = max((each.last_s for each in ended), default=0.0)
    waits = sorted(each.ttft_s for each in ended)
    tbt = [value for each in ended if (value := each.tpot_s) is not None]
    done = [step for step in report.steps if step.applied]
    serving = [moment for moment in moments if moment.end_s <= last_s]
    return Figures(
        variant=variant.name,
        retrain_rate=retrain_rate,
        request_rate=scale.rate,
        throughput=sum(each.output_tokens for each in ended) / max(last_s, 1e-9),
        ttft_s=_mean(waits),
        ttft_p95_s=percentile(waits, 0.95) if waits else float("nan"),
        tbt_s=_mean(tbt),
        fine_tune_s=_mean([step.finished_s - step.arrival_s for step in done]),
        attainment=sum(_attained(each, latency) for each in ended) / max(1, len(outcomes)),
        iterations=len(moments),
        iteration_s=_mean([moment.seconds for moment in moments]),
        utilisation=_useful_s(profile, serving) / max(last_s, 1e-9),
        jobs=jobs,
        jobs_done=len(done),
        unfinished=len(outcomes) - len(ended),
    )


def _attained(outcome: SimOutcome, latency: LatencyModel) -> bool:
    work = PassWork()
    work.span(0, outcome.prompt_tokens, draws=1)
    return outcome.ttft_s <= SLO_FACTOR * latency.forward_s(work)


def _useful_s(profile: Profile, moments: Sequence[Moment]) -> float:
    """Seconds that the products of these iterations take at the matrix ceiling: two operations a
    parameter and row, and twice as many again to go back through a recorded row."""
    row_s = 2.0 * profile.info.num_parameters / profile.ceilings.flops
    rows = sum(moment.decodes + moment.prefill + moment.training for moment in moments)
    return row_s * (rows + 2.0 * sum(moment.training for moment in moments))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else float("nan")


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that the paper says, and what came out here; `holds` compares the two."""

    text: str
    paper: str
    found: str
    holds: bool


def claims(rows: Sequence[Figures]) -> list[Claim]:
    """MACE's claims for the server (6.2, 6.3), judged on `rows` of one scale."""
    by = {(row.variant, row.retrain_rate): row for row in rows}
    rates = sorted({row.retrain_rate for row in rows} - {0.0})
    found: list[Claim] = []
    cuts = {rate: 1.0 - by["mace", rate].ttft_s / by["adainf", rate].ttft_s for rate in rates}
    best = max(cuts, key=lambda rate: cuts[rate])
    found.append(
        Claim(
            "prefill latency below adainf's",
            "63%",
            f"{cuts[best]:.0%} at a retrain rate of {best:.0%}",
            cuts[best] >= 0.63,
        )
    )
    if 0.1 in rates:
        ratio = by["mace", 0.1].throughput / by["adainf", 0.1].throughput
        found.append(
            Claim("throughput over adainf's at 10%", "1.46", f"{ratio:.2f}", ratio >= 1.46)
        )
    worst = {
        rate: min(("mace", "mace/bin", "mace/prefix"), key=lambda name: by[name, rate].attainment)
        for rate in rates
    }
    share = sum(name == "mace/bin" for name in worst.values())
    found.append(
        Claim(
            "without bins attainment is worst",
            "at every load",
            f"at {share} of {len(worst)} retrain rates",
            share == len(worst),
        )
    )
    for name, better in (("ttft_s", -1), ("throughput", 1), ("attainment", 1)):
        wins = sum(
            better * getattr(by["unified", rate], name)
            >= better * getattr(by["mace", rate], name) * (1.0 - 0.005 * better)
            for rate in rates
        )
        found.append(
            Claim(
                f"unified at least as good as mace: {name}",
                "-",
                f"at {wins} of {len(rates)} retrain rates",
                wins == len(rates),
            )
        )
    return found


def at_rate(scale: Scale, rate: float) -> Scale:
    """The same under another load."""
    return replace(scale, rate=rate)


def as_markdown(scale: Scale, profile: Profile, rows: Sequence[Figures]) -> str:
    """The table of one scale, and what became of the paper's claims."""
    lines = [
        f"## {scale.name}: {scale.profile}",
        "",
        f"{scale.rate:g} requests/s for {scale.duration_s:g} s; prompts of {scale.prompt_tokens} "
        f"tokens on average, {scale.shared_tokens} of them one of {scale.templates} beginnings; "
        f"answers of {scale.output_tokens}; a job is a pair of two sequences of "
        f"{scale.pair_tokens} tokens. Profile: {profile.source}.",
        "",
        "| retrain rate | policy | output tokens/s | TTFT mean / p95, ms | TBT, ms | "
        "fine-tuning, s | attainment | iterations | ms each | utilisation | jobs done |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.retrain_rate:.0%} | `{row.variant}` | {row.throughput:.0f} | "
            f"{1e3 * row.ttft_s:.0f} / {1e3 * row.ttft_p95_s:.0f} | {1e3 * row.tbt_s:.1f} | "
            f"{row.fine_tune_s:.1f} | {row.attainment:.1%} | {row.iterations} | "
            f"{1e3 * row.iteration_s:.1f} | {row.utilisation:.1%} | "
            f"{row.jobs_done} of {row.jobs} |"
        )
    lines += ["", "| claim | paper | here | holds |", "|---|---|---|---|"]
    for claim in claims(rows):
        holds = "yes" if claim.holds else "**no**"
        lines.append(f"| {claim.text} | {claim.paper} | {claim.found} | {holds} |")
    return "\n".join([*lines, ""])
