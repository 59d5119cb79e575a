"""Loads, a profile and options that are small enough to simulate in a test."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hypothesis import strategies as st

from fake_executor import Costs
from rates import slice_rates
from tandem.bench.simulation import Training, arrivals_of
from tandem.bench.workload import PlannedRequest
from tandem.build import build_simulation
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.events import ModelInfo
from tandem.core.plan import LanePlan
from tandem.core.slo import WorkClass
from tandem.estimators.latency import Rates
from tandem.estimators.profile import Caches, Ceilings, Profile
from tandem.sim.run import Arrival, Simulation
from tandem.sim.timeline import Timeline

NOTHING = 1e-12
VOCABULARY = 50


def small_profile(
    num_blocks: int = 64,
    noise: tuple[float, ...] = (),
    resume_s: float = 0.0,
    decode_s: float = 0.0,
    prompt_s: float = 0.0,
    cold_s: float = NOTHING,
    host_s: float = 0.0,
) -> Profile:
    """20 ms a pass, 1 ms a row; the same as the fake executor's costs below. Half of what is
    missing to warm caches is, after each pass."""
    info = ModelInfo(
        model="small", architecture="none", device="none", dtype="none", vocab_size=VOCABULARY,
        max_model_len=64, eos_token_ids=(), block_size=4, num_blocks=num_blocks,
        num_parameters=0, weight_bytes=0, kernels="none", num_layers=3, recording_tokens=64,
    )  # fmt: skip
    forward = (0.02, 0.001, *[NOTHING] * 3, 0.001, *[NOTHING] * 7, cold_s)
    slices = slice_rates(NOTHING, slice=0.002, layer_row=0.0003, again_row=0.0002)
    rates = Rates(forward, slices, 0.01, measured=True, slices_measured=True)
    return Profile(
        info,
        rates,
        Ceilings(1e12, 1e10),
        "made up",
        noise={"pass": noise},
        caches=Caches(resume_s, decode_s, prompt_s, cold_share=0.5),
        host_s=host_s,
    )


COSTS = Costs(iteration_s=0.02, token_s=0.001, slice_s=0.002, layer_token_s=0.0005, update_s=0.01)


def config(policy: str, **scheduling: object):
    given_here = {"policy": policy, "max_sequences": 8, "max_batch_tokens": 32} | scheduling
    return resolve({"scheduling": given_here})


def load(
    shapes: list[tuple[float, int, int]], steps: int = 0, offline: Collection[int] = ()
) -> tuple[list[Arrival], list]:
    """`offline` has the places, in order of arrival, of requests for which nobody waits."""
    planned = [
        PlannedRequest(place, at_s, tuple((place + row) % 5 for row in range(prompt)), output)
        for place, (at_s, prompt, output) in enumerate(sorted(shapes))
    ]
    training = Training(pairs=2, micro_batch_pairs=1, pair_tokens=10, always=steps)
    arrivals, trainers = arrivals_of(planned, training, VOCABULARY, 0)
    for place in set(offline) & set(range(len(planned))):
        work = replace(arrivals[place].work, work_class=WorkClass.OFFLINE)
        arrivals[place] = replace(arrivals[place], work=work)
    return arrivals, trainers


def run_one(policy: str, arrivals, trainers, profile: Profile, **options: object):
    clock = VirtualClock()
    timeline = Timeline(clock.now)
    plans: list[LanePlan] = []

    def on_plan(plan, result):
        plans.append(plan)
        timeline(plan, result)

    loop, _ = build_simulation(
        config(policy, **options), profile, clock, on_plan=on_plan, check_every_step=True
    )
    simulation = Simulation(loop, clock, arrivals, trainers)
    report = simulation.run(until_s=3600.0)
    return report, timeline, plans


SHAPES = st.lists(
    st.tuples(st.floats(0.0, 5.0), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=25
)
OFFLINE = st.sets(st.integers(0, 24))  # places in SHAPES
# With these, what has waited goes first in runs of a few seconds too.
IMPATIENT = {
    "unified": {"patience_s": "0.1", "min_share": "0.1"},
    "mace": {"delta_ft": "9"},
    "ekya": {"interval_s": "1"},
}
