"""The benchmark of overload runs, and its figures say what came of every request."""

from __future__ import annotations

import pytest

import benchmarks.overload.__main__ as overload
from tandem.core.slo import Slo


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_what_is_offered_ends_or_is_refused(factor):
    load = overload.Load("a100-40g:llama-3-8b", "fixed:400", "fixed:20", Slo(0.5, 0.1), 10.0, 0)
    outcomes = overload.simulate(load, 60.0, "unified", factor)
    assert len(outcomes) > 400
    assert all(each.finished != (each.error is not None) for each in outcomes)
    assert any(each.error for each in outcomes) == (factor > 0.0)
    refused, in_time, both, half, most = overload.figures(outcomes, load.slo)
    assert (refused == "0.0%") == (factor == 0.0) and float(half) <= float(most)
    assert 0.0 < float(both.rstrip("%")) <= float(in_time.rstrip("%")) < 100.0
