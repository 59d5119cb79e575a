"""A timeline's digest: all that a plan decides changes it, what was computed does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from tandem.core.plan import (
    BackwardSlice,
    BlockCopy,
    Discard,
    LanePlan,
    OpenMicroBatch,
    RecordTarget,
    Span,
    StepResult,
    Update,
)
from tandem.sim.timeline import Timeline

SPAN = Span(1, 4, (7, 8), ((2, 3),))
PLAN = LanePlan(5, "device", (SPAN,), slices=(BackwardSlice(1, 3, 0, (0.5,)),))


def digest(plan: LanePlan) -> int:
    timeline = Timeline(lambda: 0.0)
    timeline(plan, StepResult(plan.step, plan.lane, 0.1))
    return timeline.digest


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, spans=(structs.replace(SPAN, seq_id=2),)),
        replace(PLAN, spans=(structs.replace(SPAN, block_tables=((2, 4),)),)),
        replace(PLAN, spans=(structs.replace(SPAN, adapter="hash"),)),
        replace(PLAN, spans=(structs.replace(SPAN, score_targets=(1, 2)),)),
        replace(PLAN, spans=(structs.replace(SPAN, record=RecordTarget(1, 0)),)),
        replace(PLAN, copies=(BlockCopy(0, 2, 3),)),
        replace(PLAN, discards=(Discard("trainer", (1,)),)),
        replace(PLAN, opens=(OpenMicroBatch(1, "trainer", 0, (2,)),)),
        replace(PLAN, slices=(BackwardSlice(1, 3, 1, (0.5,)),)),
        replace(PLAN, updates=(Update("trainer", 0),)),
        replace(PLAN, preemptible=True),
        replace(PLAN, share=0.5),
    ],
)
def test_whatever_is_decided_counts(other):
    assert digest(other) != digest(PLAN)


def test_what_was_computed_does_not():
    other = replace(
        PLAN,
        spans=(structs.replace(SPAN, tokens=(8, 9)),),
        slices=(BackwardSlice(1, 3, 0, (0.7,)),),
    )
    assert digest(other) == digest(PLAN)
