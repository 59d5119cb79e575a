"""The study of all classes at once says what does not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.classes.__main__ import RUNS, Found, faults, page
from tandem.core.slo import Slo

SLO = Slo(2.0, 0.15)
ALONE = Found(RUNS[0], 100, 0.95, 1.0, 0.1, 0.0, 0.0, 0)
BATCH = replace(ALONE, run=RUNS[1], offline_tokens_s=10.0)
ALL = replace(BATCH, run=RUNS[2], trained_tokens_s=10.0)


def test_nothing_is_said_if_all_holds():
    slower = replace(BATCH, attainment=0.945, ttft_p99_s=1.9, tpot_p99_s=0.15)
    assert faults([ALONE, slower, ALL], SLO) == []


def test_a_percentile_outside_its_objective_may_be_a_tenth_longer():
    alone = replace(ALONE, ttft_p99_s=3.0)
    assert faults([alone, replace(BATCH, ttft_p99_s=3.2), ALL], SLO) == []
    assert len(faults([alone, replace(BATCH, ttft_p99_s=3.4), ALL], SLO)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"attainment": 0.93},
        {"tpot_p99_s": 0.2},
        {"offline_tokens_s": 0.0},
        {"trained_tokens_s": 0.0},
        {"lost_blocks": 1},
    ],
)
def test_each_fault_is_told(change):
    found = [ALONE, BATCH, replace(ALL, **change)]
    wrong = faults(found, SLO)
    assert len(wrong) == 1 and wrong[0] in page("t", found, wrong, "p.png")
