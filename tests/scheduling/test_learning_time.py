"""How much of what requests leave is learning's: the less, the closer they are to being late."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from rates import slice_rates
from tandem.core.slo import Slo
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.work import PassWork
from tandem.scheduling.deadlines import Deadlines
from tandem.scheduling.learning_time import LearningTime
from tandem.scheduling.overdue import Overdue
from tandem.scheduling.serving import Serving

RATES = Rates((0.01, 1e-9, 1e-9, 1e-9, 1e-9, 1e-3, *[1e-9] * 8), slice_rates(), 0.01, 1.0, True)

SLO = Slo(2.0, 0.05)


@dataclass
class Stage:
    """What is read of a view."""

    now: float = 5.0
    default_slo: Slo = SLO
    latency: LatencyModel = field(default_factory=lambda: LatencyModel(RATES))


class Lesson:
    """What is read of an item: the least of it takes a millisecond."""

    def least_s(self, latency: LatencyModel) -> float:
        return 1e-3


def shares(ease: float, due_s: float = 0.2, waiting: int = 0) -> tuple[float, float]:
    """Of the slack beside a pass of 0.1 s: learning's beside it, and alone."""
    deadlines = Deadlines()
    deadlines.ease = ease
    time = LearningTime(deadlines, Overdue(0.05, 30.0), 0.25, 0.5, 0.002)
    time.served_s = 5.0
    requests = Serving([None] * waiting, work=PassWork(decodes=1), predicted_s=0.1, due_s=due_s)
    time.earn(Stage(), Lesson(), requests)
    budget = time.budget(Stage(), requests)
    assert not budget.owed
    slack_s = due_s - 0.1
    return budget.beside_s / slack_s, budget.alone_s / slack_s


@pytest.mark.parametrize(
    ("ease", "beside", "alone"),
    [(1.0, 1.0, 0.5), (0.5, 1.0, 0.25), (0.4, 0.8, 0.16), (0.1, 0.2, 0.02), (0.0, 0.02, 0.02)],
)
def test_the_share_of_the_slack_follows_the_ease(ease, beside, alone):
    assert shares(ease) == pytest.approx((beside, alone))


def test_nothing_takes_longer_than_the_ceiling():
    beside, alone = shares(1.0, due_s=10.1)
    assert beside == pytest.approx((0.25 - 0.1) / 10.0)
    assert alone == pytest.approx(0.25 / 10.0)


def test_learning_is_not_alone_while_prompts_wait():
    assert shares(1.0, waiting=1) == pytest.approx((1.0, 0.0))


def test_without_requests_it_may_be_alone_for_as_long_as_that_gives_way():
    time = LearningTime(Deadlines(), Overdue(0.05, 30.0), 0.25, 0.5, 0.002)
    nobody = Serving(due_s=float("inf"))
    time.earn(Stage(), Lesson(), nobody)
    assert time.budget(Stage(), nobody).alone_s == 0.5
