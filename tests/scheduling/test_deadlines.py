"""Deadlines of online requests: the first one counts, and a missed one moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from tandem.core.request import Request
from tandem.core.sequence import Sequence
from tandem.core.slo import Slo, WorkClass
from tandem.scheduling.deadlines import Deadlines
from tandem.scheduling.view import Budgets


@dataclass
class FakeView:
    """What deadlines read of a view."""

    now: float
    budgets: Budgets = field(default_factory=lambda: Budgets(1, 32))
    default_slo: Slo = field(default_factory=lambda: Slo(1.0, 0.1))
    serving: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)


def sequence(number: int, output: int = 0, prompt: int = 10, **of_request: object) -> Sequence:
    request = Request(str(number), (1,) * prompt, **of_request)
    tokens = [1] * (prompt + output)
    return Sequence(number, request, 0, None, tokens, computed=len(tokens) - 1 if output else 0)


def test_the_first_deadline_of_an_online_request_counts():
    online, early = sequence(0, output=3), sequence(1, slo=Slo(0.5, 0.1))
    offline = sequence(2, work_class=WorkClass.OFFLINE)
    deadlines = Deadlines()
    assert deadlines.slack_s(FakeView(0.2), [online, offline]) == pytest.approx(1.1)
    assert deadlines.slack_s(FakeView(0.2), [online, early]) == pytest.approx(0.3)
    assert deadlines.slack_s(FakeView(0.2), [offline]) == math.inf


def test_a_long_prompt_has_its_share_of_the_slack_in_each_iteration():
    assert Deadlines().slack_s(FakeView(0.1), [sequence(0, prompt=96)]) == pytest.approx(0.3)


def test_a_missed_deadline_moves_and_takes_the_later_ones_along():
    seq, deadlines = sequence(0), Deadlines()
    assert deadlines.slack_s(FakeView(5.0), [seq]) == pytest.approx(0.1)
    seq.tokens.append(1)
    assert deadlines.slack_s(FakeView(5.0), [seq]) == pytest.approx(0.2)
    assert Deadlines().slack_s(FakeView(5.0), [seq]) == pytest.approx(0.1)


def test_moves_of_requests_that_are_gone_are_forgotten():
    deadlines, late = Deadlines(), [sequence(number) for number in range(4)]
    deadlines.slack_s(FakeView(5.0), late)
    deadlines.forget_ended(FakeView(5.0, serving=late[:1], waiting=late[1:2]))
    assert set(deadlines._moved_s) == {0, 1}
