"""RT-LM's constants follow from the time model and the answers."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from tandem.estimators.batching import Batching, batch_at_full_use, fit_batching
from tandem.estimators.datasheet import datasheet_profile
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.profile import read_profile, write_profile
from tandem.estimators.work import PassWork

PROFILE = datasheet_profile("l4", "llama-3-8b")
RATES = Rates.guess(weight_bytes=10**9, num_parameters=5 * 10**8, num_layers=24)
LATENCY = LatencyModel(RATES)


def step_s(batch: int, context: int) -> float:
    work = PassWork()
    work.decode_all([context] * batch)
    return LATENCY.forward_s(work)


def test_twice_the_batch_brings_little_from_full_use_on():
    def gain(batch: int) -> float:
        return 2 * step_s(batch, 300) / step_s(2 * batch, 300)

    batch = batch_at_full_use(LATENCY, 300)
    assert 1 < batch < 256
    assert gain(batch) < 1.1 <= gain(batch - 1)


def test_eta_is_a_step_of_a_full_batch_and_phi_brings_the_mean_answer_to_its_priority_point():
    answers = [(10, 300), (90, 100)]
    found = fit_batching(RATES, 0.002, answers)
    assert found.eta == pytest.approx(step_s(found.batch, 150) + 0.002)
    decodes_s = found.eta * fmean(made for _, made in answers)
    assert decodes_s < found.phi * fmean(taken for taken, _ in answers) < 1.1 * decodes_s
    assert found.alpha is found.gather is None


def test_constants_come_back_with_the_profile_and_name_options(tmp_path):
    batching = Batching(0.08, 0.05, 11, alpha=1.2)
    write_profile(replace(PROFILE, batching=batching), tmp_path / "l4.json")
    assert read_profile(tmp_path / "l4.json").batching == batching
    assert batching.options == {"phi": "0.08", "eta": "0.05", "batch": "11", "alpha": "1.2"}


def test_constants_are_above_nought():
    for name in ("phi", "eta", "batch"):
        with pytest.raises(ValueError, match="above 0"):
            replace(Batching(0.08, 0.05, 11), **{name: 0})
