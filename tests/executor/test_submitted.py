"""Plans between `submit` and `poll`."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.plan import DEVICE_LANE, LanePlan
from tandem.executor.device import Mark
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
