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
    waiting, early = sequence(0), sequence(1, slo=Slo(0.5, 0.1))
    offline = sequence(2, work_class=WorkClass.OFFLINE)
    deadlines = Deadlines()
    assert deadlines.slack_s(FakeView(0.2), [waiting, offline]) == pytest.approx(0.8)
    assert deadlines.slack_s(FakeView(0.2), [waiting, early]) == pytest.approx(0.3)
    assert deadlines.slack_s(FakeView(0.2), [offline]) == math.inf


def test_later_tokens_count_from_when_the_first_one_came():
    """Not from when it was due: 0.9 of the objective each, and an answer may be one behind."""
    seq, deadlines = sequence(0, output=1), Deadlines()
    assert deadlines.slack_s(FakeView(0.2), [seq]) == pytest.approx(0.18)
    seq.tokens.append(1)
    assert deadlines.slack_s(FakeView(0.22), [seq]) == pytest.approx(0.25)
    seq.tokens += [1] * 8
    assert deadlines.slack_s(FakeView(1.0), [seq]) == pytest.approx(0.19)


def test_a_long_prompt_has_its_share_of_the_slack_in_each_iteration():
    assert Deadlines().slack_s(FakeView(0.1), [sequence(0, prompt=96)]) == pytest.approx(0.3)


def test_a_missed_deadline_moves_and_takes_the_later_ones_along():
    assert Deadlines().slack_s(FakeView(5.0), [sequence(0)]) == pytest.approx(0.09)
    seq, deadlines = sequence(0, output=1), Deadlines()
    deadlines.slack_s(FakeView(5.0), [seq])
    assert deadlines.slack_s(FakeView(6.0), [seq]) == pytest.approx(0.09)
    seq.tokens.append(1)
    assert deadlines.slack_s(FakeView(6.0), [seq]) == pytest.approx(0.18)


def test_the_tightest_first_token_objective_of_the_last_minute_is_remembered():
    deadlines, hasty = Deadlines(), sequence(0, slo=Slo(0.2, 0.1))
    assert deadlines.ttft_s(FakeView(5.0)) == 1.0
    deadlines.slack_s(FakeView(5.0), [hasty])
    deadlines.slack_s(FakeView(6.0), [sequence(1), sequence(2, slo=Slo(9.0, 0.1))])
    assert deadlines.ttft_s(FakeView(65.0)) == 0.2
    assert deadlines.ttft_s(FakeView(65.1)) == 1.0
    deadlines.slack_s(FakeView(65.1), [sequence(2, slo=Slo(9.0, 0.1))])
    assert deadlines.ttft_s(FakeView(65.1)) == 1.0


def test_an_answer_that_began_unseen_counts_too():
    deadlines = Deadlines()
    deadlines.slack_s(FakeView(5.0), [sequence(0, output=1, slo=Slo(0.2, 0.1))])
    assert deadlines.ttft_s(FakeView(5.0)) == 0.2


def test_what_is_known_of_requests_that_are_gone_is_forgotten():
    deadlines, running = Deadlines(), [sequence(number, output=1) for number in range(4)]
    deadlines.slack_s(FakeView(5.0), running)
    deadlines.forget_ended(FakeView(5.0, serving=running[:1], waiting=running[1:2]))
    assert set(deadlines._from_s) == {0, 1}
