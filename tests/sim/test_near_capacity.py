"""Learning and batches that are always on offer cost requests next to none of their objectives."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import count
from random import Random

import pytest

from rates import slice_rates
from tandem.build import join_loop
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.events import ModelInfo
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
from tandem.estimators.latency import Rates
from tandem.estimators.profile import Ceilings, Profile
from tandem.sim.curves import Saturating
from tandem.sim.executor import SimExecutor
from tandem.sim.run import Arrival, Simulation

# 61 million parameters on two processor cores, as `tandem profile` measured them; the
# terms of slices are told apart by estimate.
RATES = Rates(
    (
        6.4e-3, 5.6e-5, 7.2e-4, 5.4e-5, 4.2e-5, 3.6e-5, 5.2e-3, 2.8e-5, 2.2e-5, 9.0e-3, 3.0e-5,
        1e-9, 1e-9, 1e-9,
    ),
    slice_rates(
        slice=2.2e-3, layer=8.2e-4, layer_row=9e-6, again_row=4e-6, rest_row=2e-6, first=2e-3,
        first_row=4e-6,
    ),
    2.8e-3, 1.0, True, True,
)  # fmt: skip
# 135 million parameters in float32 on two cores with AVX2: a prompt of 500 tokens takes as long as
# 25 decodes.
SLOW = Rates(
    (
        1.7e-2, 1e-9, 5.3e-3, 1e-9, 9.6e-3, 1.7e-3, 0.83, 2.2e-3, 1.3e-3, 4.5e-3, 1e-4, 1e-9, 6e-4,
        1e-9,
    ),
    slice_rates(slice=7e-4, layer=1.3e-3, layer_row=1e-4, again=4.4e-3, again_row=3e-5, first=2e-3),
    1.8e-2, 0.8, True, True,
)  # fmt: skip
NOISE = tuple(-0.1 + 0.005 * place for place in range(40))
INFO = ModelInfo(
    model="small", architecture="none", device="none", dtype="bfloat16", vocab_size=1000,
    max_model_len=4096, eos_token_ids=(), block_size=16, num_blocks=8000, num_parameters=61_000_000,
    weight_bytes=122_000_000, kernels="none", num_layers=8, recording_tokens=50_000,
)  # fmt: skip
PROFILE = Profile(INFO, RATES, Ceilings(2e12, 2e10), "made up", noise={"pass": NOISE})
# Five times what a request that is alone takes; about 34 requests/s are all that can be served.
SLO = Slo(ttft_s=0.085, tpot_s=0.035)
SECONDS = 60.0


def arrivals(rate: float, seed: int) -> list[Arrival]:
    """Poisson; prompts of 40 to 1,500 tokens, mostly short ones, and outputs of 50."""
    random = Random(seed)
    found: list[Arrival] = []
    at_s = random.expovariate(rate)
    while at_s < SECONDS:
        length = int(min(1500, 40 + random.expovariate(1 / 220)))
        prompt = tuple(random.randrange(1000) for _ in range(length))
        outputs = 1 + int(random.expovariate(1 / 50))
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, temperature=0.0)
        found.append(Arrival(at_s, Request(f"r{len(found)}", prompt, params, slo=SLO)))
        at_s += random.expovariate(rate)
    return found


def offline(number: int) -> list[Arrival]:
    """There from the start: prompts of 200 to 1,200 tokens, outputs of 20 to 150."""
    random, found = Random(number), []
    for place in range(number):
        prompt = tuple(random.randrange(1000) for _ in range(random.randint(200, 1200)))
        params = SamplingParams(max_tokens=random.randint(20, 150), ignore_eos=True)
        request = Request(f"offline-{place}", prompt, params, work_class=WorkClass.OFFLINE)
        found.append(Arrival(0.0, request))
    return found


@dataclass(frozen=True)
class Found:
    """Share of the online requests that met both objectives, steps trained, and tokens of offline
    requests that have begun to be answered."""

    attained: float
    steps: int
    offline_tokens: int


def found(
    policy: str, rate: float, seed: int, *, batch: int = 0, trains: bool = True, **options: str
) -> Found:
    """A run until its end, or with `batch` offline requests for half of the arrivals' time."""
    until_s = SECONDS / 2 if batch else math.inf
    clock = VirtualClock()
    executor = SimExecutor(PROFILE, clock, curve=Saturating(), seed=seed)
    config = resolve({"scheduling": {"policy": policy, "policy_options": options}})
    loop = join_loop(config, executor, clock=clock, rates=RATES)
    numbers = count()
    supply = (lambda: step(next(numbers))) if trains else None
    simulation = Simulation(
        loop, clock, [*arrivals(rate, seed), *offline(batch)], [TrainerSpec("learner")],
        leaps=executor, supply=supply,
    )  # fmt: skip
    report = simulation.run(until_s)
    online, others = [], []
    for name, each in report.outcomes.items():
        if name.startswith("offline"):
            others.append(each)
        elif each.arrival_s < until_s - 3.0:  # the last ones have not ended
            online.append(each)
    met = [
        each.ttft_s <= SLO.ttft_s and (each.tpot_s or 0.0) <= SLO.tpot_s
        for each in online
        if each.output_tokens
    ]
    tokens = sum(each.prompt_tokens + each.output_tokens for each in others if each.finished)
    return Found(sum(met) / len(online), len(report.steps), tokens)


def step(number: int) -> TrainingStep:
    group = tuple(TrainingSequence(tuple(range(512)), 1, Role.TARGET) for _ in range(2))
    return TrainingStep(f"step-{number}", "learner", LossSpec(LossKind.SFT), (group,))


def test_near_the_capacity_learning_leaves_requests_their_objectives():
    """At nine tenths of it, whatever learning takes delays all that come after."""
    learning, without = found("unified", 30.0, 0), found("no_retrain", 30.0, 0)
    assert without.attained > 0.2
    assert learning.attained > without.attained - 0.05
    assert learning.steps > 0


@pytest.mark.full
@pytest.mark.parametrize("trains", [False, True])
def test_a_batch_that_waits_leaves_online_requests_their_objectives(trains):
    alone = found("unified", 10.0, 0, trains=trains)
    beside = found("unified", 10.0, 0, batch=300, trains=trains)
    assert alone.attained > 0.9
    assert beside.attained > alone.attained - 0.03
    assert beside.offline_tokens > 10_000
    # In order of class alone, prompts of the batch fill every pass.
    assert found("no_retrain", 10.0, 0, batch=300, trains=trains).attained < 0.5


@pytest.mark.full
def test_the_weight_of_training_shares_what_is_left_between_a_batch_and_learning():
    few, many = (found("unified", 10.0, 0, batch=300, training_weight=part) for part in ("32", "1"))
    assert few.steps > 2 * many.steps > 0
    assert many.offline_tokens > 1.5 * few.offline_tokens > 0


def test_a_burst_does_not_wait_for_the_slots_of_a_batch():
    """All slots are held by long offline answers when twenty online requests come at once."""
    waits = []
    for batch in (0, 32):
        clock = VirtualClock()
        executor = SimExecutor(PROFILE, clock, curve=Saturating(), seed=0)
        loop = join_loop(
            resolve({"scheduling": {"max_sequences": 32}}), executor, clock=clock, rates=RATES
        )
        long = SamplingParams(max_tokens=2000, ignore_eos=True)
        given = [
            Arrival(0.0, Request(f"offline-{n}", (n, 1), long, work_class=WorkClass.OFFLINE))
            for n in range(batch)
        ]
        short = SamplingParams(max_tokens=4, ignore_eos=True)
        given += [
            Arrival(5.0, Request(f"r{n}", tuple(range(n, n + 20)), short, slo=SLO))
            for n in range(20)
        ]
        report = Simulation(loop, clock, given, leaps=executor).run(until_s=8.0)
        assert all(each.output_tokens > 1 for each in report.outcomes.values())
        online = [each for name, each in report.outcomes.items() if name.startswith("r")]
        waits.append(max(each.ttft_s for each in online))
    assert waits[1] < 1.5 * waits[0] + 0.05


def test_a_batch_leaves_learning_slots():
    """More long answers than slots: steps are made all the same."""
    clock, numbers = VirtualClock(), count()
    executor = SimExecutor(PROFILE, clock, curve=Saturating(), seed=0)
    loop = join_loop(
        resolve({"scheduling": {"max_sequences": 16}}), executor, clock=clock, rates=RATES
    )
    long = SamplingParams(max_tokens=3000, ignore_eos=True)
    given = [
        Arrival(0.0, Request(f"offline-{n}", (n, 1), long, work_class=WorkClass.OFFLINE))
        for n in range(40)
    ]
    simulation = Simulation(
        loop, clock, given, [TrainerSpec("learner")],
        leaps=executor, supply=lambda: step(next(numbers)),
    )  # fmt: skip
    report = simulation.run(until_s=20.0)
    assert len(report.steps) > 3
    assert sum(each.output_tokens for each in report.outcomes.values()) > 500


def test_answers_keep_time_for_the_next_prompt():
    """Else a prompt that comes beside a batch makes all of them late."""
    slo, random, given = Slo(2.0, 0.15), Random(0), []
    at_s = 0.0
    while (at_s := at_s + random.expovariate(0.3)) < 400.0:
        prompt = tuple(random.randrange(1000) for _ in range(random.randint(100, 500)))
        params = SamplingParams(max_tokens=random.randint(20, 120), ignore_eos=True)
        given.append(Arrival(at_s, Request(f"r{len(given)}", prompt, params, slo=slo)))
    attained, offline_tokens = [], 0
    for batch in (0, 200):
        clock = VirtualClock()
        profile = replace(PROFILE, rates=SLOW)
        executor = SimExecutor(profile, clock, curve=Saturating(), seed=0)
        loop = join_loop(resolve({}), executor, clock=clock, rates=SLOW)
        report = Simulation(loop, clock, [*given, *offline(batch)], leaps=executor).run(410.0)
        online = [each for name, each in report.outcomes.items() if name.startswith("r")]
        met = [e.ttft_s <= slo.ttft_s and (e.tpot_s or 0.0) <= slo.tpot_s for e in online]
        attained.append(sum(met) / len(met))
        others = [each for name, each in report.outcomes.items() if name.startswith("offline")]
        offline_tokens = sum(each.output_tokens for each in others)
    assert attained[1] > attained[0] - 0.03
    assert offline_tokens > 10_000
