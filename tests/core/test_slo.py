"""Objectives: what was met, how they are written, and whose count."""

from __future__ import annotations

import pytest

from tandem.core.errors import InvalidRequest
from tandem.core.slo import Objectives, Slo


def test_what_an_answer_met():
    slo = Slo(0.5, 0.05)
    times = ((0.5, 0.05), (0.4, 0.06), (0.6, 0.01), (0.6, 0.06))
    assert [slo.met(*pair) for pair in times] == ["both", "ttft", "tpot", "neither"]


def test_objectives_are_written_with_a_colon():
    assert Slo.parse("0.5:0.05") == Slo(0.5, 0.05)
    for text in ("", "1", "1:2:3", "a:b", "0:1", "1:-1", "nan:1", "inf:1"):
        with pytest.raises(InvalidRequest, match="TTFT:TPOT"):
            Slo.parse(text)


def test_each_objective_is_the_requests_own_then_the_adapters_then_the_default():
    found = Objectives(Slo(1.0, 0.1), {"formal": Slo(0.5, 0.05), "base": Slo(2.0, 0.2)})
    assert found.of("formal") == Slo(0.5, 0.05)
    assert found.of("formal", 0.3) == Slo(0.3, 0.05)
    assert found.of("base", None, 0.3) == Slo(2.0, 0.3)
    assert found.of("other") == Slo(1.0, 0.1)
