"""`tandem simulate`: a planned load and a stream of training in the simulator, as a report.

Joins workloads, the simulator's run and the figures of `measure`. The caller makes the engine.
Invariant: the same options give the same report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any

import msgspec

from tandem.bench.measure import Outcome, Summary, summarise
from tandem.bench.workload import PlannedRequest
from tandem.core.errors import InvalidRequest
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo, WorkClass
from tandem.core.training import (
    LossKind,
    LossSpec,
    Role,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.sim.run import Arrival, SimOutcome, SimReport
from tandem.sim.timeline import Moment

SCHEMA = "tandem-simulation-1"
TRAINER = "feedback"


@dataclass(frozen=True, slots=True)
class Training:
    """Preference pairs that arrive evenly beside requests, `rate` of them per request.

    Every `pairs` of them queue one step. A pair is two sequences of `pair_tokens` tokens, of which
    half are the answer.
    """

    rate: float = 0.0
    pairs: int = 8
    micro_batch_pairs: int = 4
    pair_tokens: int = 256
    always: int = 0  # steps queued at the beginning instead
    beta: float = 0.1

    def __post_init__(self) -> None:
        if self.rate < 0.0 or min(self.pairs, self.micro_batch_pairs) < 1 or self.pair_tokens < 4:
            raise InvalidRequest("training needs a rate of at least 0, pairs and 4 tokens each")


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Time of a step's update, the revision that it made, and the loss before it."""

    at_s: float
    revision: int
    loss: float


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Results of a simulation."""

    policy: str
    profile: str
    summary: Summary
    iterations: int
    simulated_s: float
    real_s: float
    speedup: float  # simulated over real seconds
    steps: int  # steps whose update was made
    training_tokens_s: float  # trained rows per simulated second
    busy_share: float  # of the device
    cached_share: float
    losses: tuple[StepLoss, ...] = ()  # of each such step
    offline: Summary | None = None  # of the requests of a batch; `summary` is of the others
    options: dict[str, Any] = field(default_factory=dict)


def arrivals_of(
    planned: Sequence[PlannedRequest], training: Training, vocabulary: int, seed: int
) -> tuple[list[Arrival], list[TrainerSpec]]:
    """Requests that end after exactly their output tokens, and training steps beside them."""
    arrivals = [
        Arrival(
            request.at_s,
            Request(
                f"request-{request.index}",
                request.prompt,
                SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True),
            ),
        )
        for request in planned
    ]
    steps = [0.0] * training.always
    for place, request in enumerate(planned, 1):
        pairs = int(training.rate * place + 1e-9)  # arrived by now
        due = pairs // training.pairs + training.always - len(steps)
        steps += [request.at_s] * due
    rng = Random(f"{seed}/pairs")
    arrivals += [
        Arrival(at_s, _step(number, training, vocabulary, rng)) for number, at_s in enumerate(steps)
    ]
    return arrivals, [TrainerSpec(TRAINER)] if steps else []


def steps_of(training: Training, vocabulary: int, seed: int) -> Iterator[TrainingStep]:
    """Steps without end."""
    rng = Random(f"{seed}/pairs")
    return (_step(number, training, vocabulary, rng) for number in count())


def _step(number: int, training: Training, vocabulary: int, rng: Random) -> TrainingStep:
    """Pairs of random tokens. Half of each sequence is the prompt."""
    tokens = training.pair_tokens

    def sequence(role: Role) -> TrainingSequence:
        made = tuple(rng.randrange(vocabulary) for _ in range(tokens))
        return TrainingSequence(made, tokens // 2, role)

    pairs = [(sequence(Role.CHOSEN), sequence(Role.REJECTED)) for _ in range(training.pairs)]
    size = training.micro_batch_pairs
    batches = tuple(
        tuple(each for pair in pairs[first : first + size] for each in pair)
        for first in range(0, len(pairs), size)
    )
    return TrainingStep(f"step-{number}", TRAINER, LossSpec(LossKind.DPO, training.beta), batches)


def outcomes_of(report: SimReport, work_class: WorkClass = WorkClass.ONLINE) -> list[Outcome]:
    """Outcomes of one class of requests as the load generator would see them, without the times
    between tokens."""
    found = [each for each in report.outcomes.values() if each.work_class is work_class]
    return [_outcome(place, each) for place, each in enumerate(found)]


def _outcome(index: int, found: SimOutcome) -> Outcome:
    answered = not math.isnan(found.last_s)
    return Outcome(
        index,
        found.arrival_s,
        found.arrival_s,
        [found.first_s, found.last_s] if answered else [],
        found.last_s if answered else found.arrival_s,
        found.prompt_tokens,
        found.output_tokens,
        True,
        found.error or (None if found.finished else "unfinished"),
    )


def describe(
    policy: str,
    profile: str,
    report: SimReport,
    moments: Sequence[Moment],
    real_s: float,
    slo: Slo,
    options: dict[str, Any],
) -> SimulatedRun:
    """The figures of a run. `moments` may be empty."""
    outcomes = list(report.outcomes.values())
    online, offline = outcomes_of(report), outcomes_of(report, WorkClass.OFFLINE)
    rows = sum(moment.training for moment in moments)
    prompt = sum(each.prompt_tokens for each in outcomes)
    ended_s = max(report.ended_s, 1e-9)
    applied = [step for step in report.steps if step.applied]
    return SimulatedRun(
        policy=policy,
        profile=profile,
        summary=replace(summarise(online, slo), itl=None),
        iterations=report.iterations,
        simulated_s=report.ended_s,
        real_s=real_s,
        speedup=report.ended_s / max(real_s, 1e-9),
        steps=len(applied),
        training_tokens_s=rows / ended_s,
        busy_share=sum(moment.seconds for moment in moments) / ended_s,
        cached_share=sum(each.cached_tokens for each in outcomes) / max(prompt, 1),
        losses=tuple([StepLoss(step.finished_s, step.revision, step.loss) for step in applied]),
        offline=replace(summarise(offline), itl=None) if offline else None,
        options=options,
    )


def as_json(run: SimulatedRun) -> bytes:
    """One JSON object with a `schema`."""
    content = {"schema": SCHEMA} | msgspec.to_builtins(run)
    return msgspec.json.format(msgspec.json.encode(content, enc_hook=str), indent=2) + b"\n"
