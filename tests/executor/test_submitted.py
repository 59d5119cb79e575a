"""Plans between `submit` and `poll`."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.plan import DEVICE_LANE, LanePlan, Span
from tandem.executor.device import Mark
from tandem.executor.forward import SpanOutcome
from tandem.executor.submitted import SubmittedPlan


@dataclass
class At:
    """A place that the device reaches at a known time."""

    at_s: float
    waited: bool = False

    def wait(self) -> None:
        self.waited = True

    def seconds_until(self, later: Mark) -> float:
        assert isinstance(later, At)
        return later.at_s - self.at_s


def test_times_are_the_devices_without_what_comes_once() -> None:
    ended = At(6.0)
    plan = SubmittedPlan(LanePlan(3, DEVICE_LANE, ()), At(1.0), forwarded=At(4.0), ended=ended)
    result = plan.result(lambda blocks: None)
    assert ended.waited and (result.step, result.forward_s, result.elapsed_s) == (3, 3.0, 5.0)
    plan.recording_s = 2.0
    result = plan.result(lambda blocks: None)
    assert (result.forward_s, result.elapsed_s) == (1.0, 3.0)


def test_what_a_pass_leaves_is_read_once_and_an_error_is_its_spans_own() -> None:
    """Other passes of the plan are read all the same."""
    spans = tuple(Span(number, 0, (1,), ((0,),)) for number in (7, 8))
    plan = SubmittedPlan(LanePlan(3, DEVICE_LANE, spans), At(1.0), forwarded=At(4.0), ended=At(6.0))
    plan.passes = [([0], Left("broken")), ([1], Left(None))]  # type: ignore[list-item]
    plan.take_outcomes()
    assert plan.passes == [] and list(plan.outcomes) == [1]
    assert dict(plan.result(lambda blocks: None).failed) == {7: "the forward pass failed: broken"}


@dataclass
class Left:
    """What a pass left, or the error that reading it gives."""

    problem: str | None

    def outcomes(self) -> list[SpanOutcome]:
        if self.problem is not None:
            raise RuntimeError(self.problem)
        return [SpanOutcome([], None, False)]
