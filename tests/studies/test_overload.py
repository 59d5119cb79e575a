"""The benchmark of overload runs, and its figures say what came of every request."""

from __future__ import annotations

from statistics import fmean

import pytest

import benchmarks.overload.__main__ as overload
from tandem.bench.answers import Answer
from tandem.core.slo import Slo


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_what_is_offered_ends_or_is_refused(factor):
    load = overload.Load("a100-40g:llama-3-8b", "fixed:400", "fixed:20", Slo(0.5, 0.1), 10.0, 0)
    found = overload.simulate(load, 60.0, "unified", factor, told=False)
    outcomes = found.outcomes
    assert len(outcomes) > 400
    assert all(each.finished != (each.error is not None) for each in outcomes)
    assert any(each.error for each in outcomes) == (factor > 0.0)
    refused, in_time, both, half, most, response, predicted = overload.figures(found, load.slo)
    assert float(response) > 0.0
    assert found.waits and all(real > load.slo.ttft_s for _, real in found.waits)
    assert 0.0 < float(predicted) < 2.0
    assert (refused == "0.0%") == (factor == 0.0) and float(half) <= float(most)
    assert 0.0 < float(both.rstrip("%")) <= float(in_time.rstrip("%")) < 100.0


def test_forecasts_of_real_answers_reach_the_queue_or_nobody():
    tasks = [
        Answer(20, tokens, 400, (float(tokens),) * 5)
        for tokens in (5, 5, 5, 300)
        for _ in range(20)
    ]
    load = overload.Load("a100-40g:llama-3-8b", "", "", Slo(0.5, 0.1), 6.0, 0, tasks)
    blind, told = (
        overload.simulate(load, 200.0, "unified", 0.0, told=told) for told in (False, True)
    )
    assert len(blind.outcomes) == len(told.outcomes) > 1000

    def response_s(found: overload.Result) -> float:
        return fmean(each.last_s - each.arrival_s for each in found.outcomes)

    assert response_s(told) < 0.9 * response_s(blind), "short answers wait less for long ones"
