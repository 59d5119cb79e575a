"""MACE's comparison: loads, the policies that meet them, and the figures of a run.

Poisson requests with shared beginnings, retraining jobs as a share of the requests (MACE 6.1); the
scales are those of the paper's devices, by their data sheets. Engines are made by the caller:
simulated ones, or real ones on a real clock. Invariant: a simulated run gives the same figures
again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import fmean

from tandem.bench.measure import percentile
from tandem.core.clock import WaitingClock
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo
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
# Prompts and answers are cut here, two thirds of it and one; earlier if the model's context is.
_LONGEST_TOKENS = 3072


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with its options, under the name that the tables use."""

    name: str
    policy: str
    options: Mapping[str, str] = field(default_factory=dict)
    prefix_caching: bool = True
    max_sequences: int = 256


VARIANTS = (
    Variant("ekya", "ekya", {"interval_s": "10"}),
    Variant("adainf", "adainf"),
    Variant("mace", "mace"),
    Variant("mace/bin", "mace", {"bins": "false"}),
    Variant("mace/prefix", "mace", {"prefix": "false"}, prefix_caching=False),
    Variant("unified", "unified"),
)
# Figure 13: first in, first out for all, at most 50 answers and two jobs, of a pair each, at once.
FIFO_SEQUENCES = 54
FIFO_VARIANTS = (
    Variant("ekya", "ekya", {"interval_s": "10"}, max_sequences=FIFO_SEQUENCES),
    Variant("adainf", "adainf", max_sequences=FIFO_SEQUENCES),
    Variant("mace/bin", "mace", {"bins": "false"}, max_sequences=FIFO_SEQUENCES),
    Variant("mace/fifo", "mace", {"bins": "false", "apart": "false"}, max_sequences=FIFO_SEQUENCES),
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
    """Of one run. Latencies in seconds, means unless said, of requests that got so far; throughput
    in output tokens a second until the last token, at `last_s`; attainment as the share of requests
    whose first token came within five forward latencies. `fine_tune_s` is from a job's arrival to
    its update (nan: none ended); utilisation is the share of the matrix ceiling. `unfinished`
    requests failed or were cut off."""

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
    last_s: float


@dataclass(frozen=True, slots=True)
class Engine:
    """What meets the load: a loop, the clock that it lives by, and what it has executed."""

    loop: EngineLoop
    clock: WaitingClock
    timeline: Timeline


MakeEngine = Callable[[Variant, Profile], Engine]


@dataclass(frozen=True, slots=True)
class Load:
    """What every variant meets: a scale with its profile, and the share of retraining jobs."""

    scale: Scale
    profile: Profile
    retrain_rate: float
    seed: int = 0

    def meet(
        self, engine: Engine, on_progress: Callable[[float], None] = lambda now: None
    ) -> tuple[SimReport, int]:
        """Let it come to `engine`; it may take three times the load's duration. The report, and how
        many jobs came."""
        scale = self.scale
        arrivals, jobs = load_of(scale, self.profile, self.retrain_rate, self.seed)
        return run_arrivals(engine, scale, arrivals, 3.0 * scale.duration_s, on_progress), jobs


def run_arrivals(
    engine: Engine,
    scale: Scale,
    arrivals: Sequence[Arrival],
    until_s: float = math.inf,
    on_progress: Callable[[float], None] = lambda now: None,
) -> SimReport:
    """Let them come to `engine`, whose device is left without trainers: others follow on it."""
    trainers = [TrainerSpec(f"adapter-{number}") for number in range(scale.trainers)]
    try:
        simulation = Simulation(engine.loop, engine.clock, arrivals, trainers)
        return simulation.run(until_s, on_progress)
    finally:
        for trainer in trainers:
            engine.loop.teaching.close_trainer(trainer.name)


def run_variant(variant: Variant, load: Load, make_engine: MakeEngine) -> Figures:
    """Figures of one variant under one load."""
    engine = make_engine(variant, load.profile)
    report, jobs = load.meet(engine)
    return _figures(variant, load, report, engine.timeline.moments, jobs)


def load_of(
    scale: Scale, profile: Profile, retrain_rate: float, seed: int
) -> tuple[list[Arrival], int]:
    """Requests and retraining jobs in time, the same for every variant; how many jobs there are.
    Requests bring the objectives by which they are judged."""
    rng, latency = Random(f"{seed}/{scale.name}"), LatencyModel(profile.rates)
    vocabulary = profile.info.vocab_size
    third = min(_LONGEST_TOKENS, profile.info.max_model_len) // 3
    templates = [
        tuple(rng.choices(range(vocabulary), k=scale.shared_tokens)) for _ in range(scale.templates)
    ]
    arrivals: list[Arrival] = []
    requests, jobs, at_s = 0, 0, 0.0
    while (at_s := at_s + rng.expovariate(scale.rate)) < scale.duration_s:
        own = max(8, round(rng.expovariate(1.0 / (scale.prompt_tokens - scale.shared_tokens))))
        prompt = (*rng.choice(templates), *rng.choices(range(vocabulary), k=own))
        output = max(2, round(rng.expovariate(1.0 / scale.output_tokens)))
        prompt, output = prompt[: 2 * third], min(output, third)
        wants_training = rng.random()
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        slo = objective(scale, latency, len(prompt))
        arrivals.append(Arrival(at_s, Request(f"request-{requests}", prompt, sampling, slo=slo)))
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
    variant: Variant, load: Load, report: SimReport, moments: Sequence[Moment], jobs: int
) -> Figures:
    profile = load.profile
    outcomes = list(report.outcomes.values())
    answered = [each for each in outcomes if each.output_tokens]
    last_s = max((each.last_s for each in answered), default=0.0)
    waits = sorted(each.ttft_s for each in answered)
    tbt = [value for each in answered if (value := each.tpot_s) is not None]
    done = [step for step in report.steps if step.applied]
    serving = [moment for moment in moments if moment.end_s - report.began_s <= last_s]
    return Figures(
        variant=variant.name,
        retrain_rate=load.retrain_rate,
        request_rate=load.scale.rate,
        throughput=sum(each.output_tokens for each in answered) / max(last_s, 1e-9),
        ttft_s=_mean(waits),
        ttft_p95_s=percentile(waits, 0.95) if waits else float("nan"),
        tbt_s=_mean(tbt),
        fine_tune_s=_mean([step.finished_s - step.arrival_s for step in done]),
        attainment=sum(_attained(each) for each in answered) / max(1, len(outcomes)),
        iterations=len(moments),
        iteration_s=_mean([moment.seconds for moment in moments]),
        utilisation=_useful_s(profile, serving) / max(last_s, 1e-9),
        jobs=jobs,
        jobs_done=len(done),
        unfinished=sum(not each.finished for each in outcomes),
        last_s=last_s,
    )


def _attained(outcome: SimOutcome) -> bool:
    return outcome.slo is not None and outcome.ttft_s <= outcome.slo.ttft_s


def _useful_s(profile: Profile, moments: Sequence[Moment]) -> float:
    """Seconds that the products of these iterations take at the matrix ceiling: two operations a
    parameter and row, and two more to go back through a recorded row; not what is computed again.
    Those of embedding and head are left out where they are known: in small models they are half of
    all."""
    info = profile.info
    row_s = 2.0 * (info.layer_parameters or info.num_parameters) / profile.ceilings.flops
    rows = sum(moment.decodes + moment.prefill + moment.training for moment in moments)
    return row_s * (rows + sum(moment.training for moment in moments))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else float("nan")


def prompt_s(latency: LatencyModel, tokens: int) -> float:
    """The forward of a prompt that is alone, predicted."""
    work = PassWork()
    work.span(0, tokens, draws=1)
    return latency.forward_s(work)


def objective(
    scale: Scale, latency: LatencyModel, prompt_tokens: int, ttft_factor: float = SLO_FACTOR
) -> Slo:
    """Of a request: multiples of what its prompt's forward takes alone (MACE 6.3), and of what a
    decode in the middle of a mean answer does, of which the paper says nothing."""
    decode = PassWork()
    decode.decode(scale.prompt_tokens + scale.output_tokens // 2)
    ttft_s = ttft_factor * prompt_s(latency, prompt_tokens)
    return Slo(ttft_s, SLO_FACTOR * latency.forward_s(decode))


def at_rate(scale: Scale, rate: float) -> Scale:
    """The same under another load."""
    return replace(scale, rate=rate)
