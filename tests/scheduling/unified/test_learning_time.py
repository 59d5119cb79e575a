"""How much of what requests leave is learning's: the less, the closer they are to being late."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from rates import slice_rates
from tandem.core.decision import Candidate
from tandem.core.slo import Slo
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.work import PassWork
from tandem.scheduling.policies.unified.deadlines import Deadlines
from tandem.scheduling.policies.unified.learning_time import LearningPart, LearningTime
from tandem.scheduling.policies.unified.overdue import Overdue
from tandem.scheduling.policies.unified.serving import Serving

RATES = Rates((0.01, 1e-9, 1e-9, 1e-9, 1e-9, 1e-3, *[1e-9] * 8), slice_rates(), 0.01, 1.0, True)

SLO = Slo(2.0, 0.05)


@dataclass
class Stage:
    """What is read of a view."""

    now: float = 5.0
    default_slo: Slo = SLO
    latency: LatencyModel = field(default_factory=lambda: LatencyModel(RATES))
    last_plan: Plan | None = None


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


@dataclass
class Span:
    seq_id: int


@dataclass
class Lane:
    spans: tuple[Span, ...]


@dataclass
class Plan:
    """What is read of a plan: of one lane, these sequences."""

    step: int
    lanes: tuple[Lane, ...]


def plan(step: int, *seq_ids: int) -> Plan:
    return Plan(step, (Lane(tuple(map(Span, seq_ids))),))


def candidate(seq_id: int) -> Candidate:
    return Candidate(seq_id, None, True)


@pytest.mark.parametrize(
    ("came", "refused"),
    [
        (plan(2, 1), True),
        (plan(2, 1, 8), False),
        (plan(2, 9), False),
        (plan(1, 1, 9), True),  # nothing was admitted: it is the plan before, with a part of 9
        (None, True),
    ],
)
def test_what_is_not_admitted_is_not_used(came, refused):
    time = LearningTime(Deadlines(), Overdue(0.05, 30.0), 0.25, 0.5, 0.002)
    time.offer(Stage(last_plan=plan(1, 1, 9)), LearningPart([candidate(8)], [candidate(9)]))
    assert time.settle(Stage(last_plan=came)) == refused
    assert not time.settle(Stage(last_plan=came)), "once"


def test_time_that_was_earned_for_what_is_not_admitted_is_given_back():
    time, requests = LearningTime(Deadlines(), Overdue(0.05, 30.0), 0.25, 0.5, 0.002), Serving()
    time.earn(Stage(now=0.0), Lesson(), requests)
    time.earn(Stage(now=1.0), Lesson(), requests)
    before_s = time._earned.seconds
    spent_s = time._earned.spend(0.5)
    assert time._earned.seconds < before_s and spent_s > 0.0
    for came in (plan(2, 8), plan(2, 1)):
        time.offer(Stage(last_plan=plan(1)), LearningPart([candidate(8)], spent_s=spent_s))
        time.settle(Stage(last_plan=came))
    assert time._earned.seconds == pytest.approx(before_s), "of the second one only"
    time.offer(Stage(), LearningPart())
    assert not time.settle(Stage()), "nothing was offered"
