from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tandem.bench.measure import Outcome, distribution, percentile, summarise
from tandem.core.slo import Slo


def outcome(
    index: int, ttft_s: float, gap_s: float, tokens: int = 5, late_s: float = 0.0
) -> Outcome:
    intended_s = float(index)
    output_s = [intended_s + ttft_s + gap_s * step for step in range(tokens)]
    return Outcome(
        index,
        intended_s,
        intended_s + late_s,
        output_s,
        ended_s=output_s[-1],
        prompt_tokens=10,
        output_tokens=tokens,
        usage_reported=True,
    )


def test_percentiles_interpolate_as_numpy_does() -> None:
    rng = Random(1)
    for size in (1, 2, 3, 17, 100):
        values = sorted(rng.random() for _ in range(size))
        for share in (0.0, 0.5, 0.9, 0.99, 1.0):
            assert percentile(values, share) == pytest.approx(np.quantile(values, share))
    assert distribution([]) is None


def test_summary_of_known_outcomes() -> None:
    outcomes = [outcome(index, 0.1 * (index + 1), 0.01 * (index + 1)) for index in range(4)]
    summary = summarise(outcomes, Slo(ttft_s=0.25, tpot_s=0.05))
    assert summary.ttft is not None and summary.tpot is not None and summary.itl is not None
    assert summary.ttft.p50 == pytest.approx(0.25) and summary.ttft.max == pytest.approx(0.4)
    assert summary.tpot.mean == pytest.approx(0.025)
    assert summary.itl.count == 16
    assert summary.duration_s == pytest.approx(3.0 + 0.4 + 0.16)
    assert summary.output_token_rate == pytest.approx(20 / summary.duration_s)
    assert summary.goodput_share == 0.5
    assert summary.goodput_rate == pytest.approx(2 / summary.duration_s)
    assert summary.intended_arrival_rate == pytest.approx(1.0)
    assert not summary.client_fell_behind


def test_tpot_fails_the_objective_too_and_one_token_has_none() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.02)
    assert outcome(0, 0.1, 0.01).meets(slo)
    assert not outcome(0, 0.1, 0.03).meets(slo)
    assert not outcome(0, 1.1, 0.01).meets(slo)
    single = outcome(0, 0.1, 0.0, tokens=1)
    assert single.tpot_s is None and single.meets(slo)
    single.error = "timeout"
    assert not single.meets(slo)


def test_late_client_is_told() -> None:
    assert summarise([outcome(0, 0.1, 0.01, late_s=0.2)]).client_fell_behind


def test_nothing_complete() -> None:
    failed = Outcome(0, 0.0, 0.0, ended_s=1.0, error="connect")
    summary = summarise([failed], Slo(1.0, 1.0))
    assert summary.ttft is None and summary.errors == {"connect": 1}
    assert summary.goodput_share == 0.0 and summary.request_rate == 0.0
