"""`python -m benchmarks estimators`: errors of a profile and of a loop, their summary and page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.estimators.__main__ import (
    KINDS,
    TRAINER,
    WHOLE,
    Predicted,
    as_markdown,
    endless_steps,
    held_out,
    pooled,
)
from tandem.bench.simulation import Training, arrivals_of
from tandem.bench.workload import PlannedRequest
from tandem.build import build_simulation
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.training import TrainerSpec
from tandem.estimators.datasheet import datasheet_profile
from tandem.estimators.latency import LatencyModel
from tandem.estimators.profile import FitError
from tandem.sim.run import Simulation

PROFILE = datasheet_profile("l4", "qwen2.5-0.5b")


def test_residuals_of_a_profile_become_errors_of_predictions():
    """Noise is what a pass took over what was predicted; errors are the other way round."""
    noise = {"pass": (-0.2, 0.25, 1.0), "decode": (0.25, -0.2), "mixed": (1.0,), "slice": (-0.5,)}
    profile = replace(PROFILE, noise=noise)
    found = held_out(profile)
    assert found["decode"] == pytest.approx([-0.2, 0.25])
    assert found["pass"] == pytest.approx([0.25, -0.2, -0.5])
    assert found["slice"] == pytest.approx([1.0]) and found[WHOLE] == []


def test_an_error_has_the_bias_the_mean_and_what_95_percent_are_at_most():
    found = FitError.of([place / 100 * (-1) ** place for place in range(100)])
    assert found is not None and found.samples == 100
    assert found.mape == pytest.approx(0.495) and found.p95 == pytest.approx(0.95)
    assert found.bias == pytest.approx(-0.005)
    assert FitError.of([]) is None


def test_every_pass_slice_and_iteration_of_a_loop_has_an_error():
    """On a device that takes a quarter longer than its profile says."""
    rates = PROFILE.rates
    slow = replace(
        rates,
        forward=tuple(1.25 * each for each in rates.forward),
        slices=tuple(1.25 * each for each in rates.slices),
        update_s=1.25 * rates.update_s,
    )
    clock = VirtualClock()
    loop, _ = build_simulation(resolve({}), replace(PROFILE, rates=slow), clock, seed=0)
    loop.on_plan = found = Predicted(LatencyModel(rates), learns=False)
    load = [PlannedRequest(n, 0.1 * n, tuple(range(n, n + 40)), 5 + n % 4) for n in range(20)]
    arrivals, _ = arrivals_of(load, Training(), PROFILE.info.vocab_size, 0)
    steps = endless_steps(PROFILE.info.vocab_size, 0)
    trainer = TrainerSpec(TRAINER)
    report = Simulation(loop, clock, arrivals, [trainer], supply=lambda: next(steps)).run()
    errors = pooled([found.errors])
    assert errors[WHOLE] is not None and errors[WHOLE]["samples"] == report.iterations
    kinds = ("decode", "prefill", "mixed", "training")
    passes = sum(each["samples"] for kind in kinds if (each := errors[kind]) is not None)
    assert errors["pass"] is not None and errors["pass"]["samples"] == passes > 0
    for kind in ("pass", "training", "slice", WHOLE):
        each = errors[kind]
        assert each is not None and each["bias"] == pytest.approx(-0.2)
        assert each["mape"] == pytest.approx(0.2)


def test_the_page_has_every_kind_and_round():
    errors = pooled([{kind: [0.1, -0.3] for kind in KINDS}])
    errors["mixed"] = None
    columns = {"held_out": errors, "profiled": errors, "corrected": errors}
    unrest = {"samples": 1, "bias": 0.02, "mape": 0.02, "p95": 0.02}
    page_data = {
        "machine": {"cpu": "some"}, "model": "small", "dtype": "float32", "profile_s": 60.0,
        "serve_s": 90.0, "rate": 0.4, "pooled": dict(columns),
        "rounds": [{"unrest": unrest, **columns}, {"unrest": None, **columns}],
    }  # fmt: skip
    page = as_markdown(page_data)
    assert "| pass | 20.0%, 30.0% (2) | 20.0%, 30.0% (2) | 20.0%, 30.0% (2) |" in page
    assert "| mixed | - | - | - |" in page
    assert "Passes held out of the profile: 20.00%, 30.0%, **not reached**." in page
    for column in columns:
        columns[column] = pooled([{kind: [0.01, -0.05] for kind in KINDS}])
    good = as_markdown(page_data | {"pooled": columns})
    assert "Iterations while serving: 3.00%, 5.0%, reached." in good
    assert "| 1 | 2.0%, 2.0% (1) | 20.0%, 30.0% (2) |" in page and "| 2 | - | 20.0%" in page
