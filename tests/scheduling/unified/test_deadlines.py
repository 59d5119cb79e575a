"""Deadlines of online requests: the first one counts, and a missed one moves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import Sequence
from tandem.core.slo import Slo, WorkClass
from tandem.estimators.work import PassWork
from tandem.scheduling.policies.unified.deadlines import Deadlines, margin
from tandem.scheduling.view import Budgets


@dataclass
class FakeLatency:
    """A millisecond a row. Deadlines aim at nine tenths of TPOT."""

    uncertainty: float = 1 / 9

    def forward_s(self, work: PassWork) -> float:
        return 1e-3 * work.tokens

    def added_s(self, work: PassWork) -> float:
        return 0.8e-3 * work.tokens


@dataclass
class FakeView:
    """What deadlines read of a view."""

    now: float
    budgets: Budgets = field(default_factory=lambda: Budgets(1, 32))
    default_slo: Slo = field(default_factory=lambda: Slo(1.0, 0.1))
    serving: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    latency: FakeLatency = field(default_factory=FakeLatency)

    def slo(self, seq: Sequence) -> Slo:
        return seq.request.slo or self.default_slo


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
    assert deadlines.slack_s(FakeView(0.9), [seq]) == pytest.approx(0.29)


def test_an_answer_that_is_seen_late_has_its_deadlines_from_its_first_token_on():
    seq = sequence(0, output=4)
    seq.first_token_s = 5.0
    assert Deadlines().slack_s(FakeView(5.3), [seq]) == pytest.approx(0.15)
    seq.first_token_s = 4.8
    assert Deadlines().slack_s(FakeView(5.27), [seq]) == 0.0
    seq.first_token_s = 3.0
    assert Deadlines().slack_s(FakeView(5.3), [seq]) == pytest.approx(0.09), "it has moved"


@pytest.mark.parametrize(("max_tokens", "slack_s"), [(2, 0.09), (4, 0.09), (5, 0.18)])
def test_an_answer_too_short_to_make_it_good_may_not_be_behind(max_tokens, slack_s):
    seq = sequence(0, output=1, sampling=SamplingParams(max_tokens=max_tokens))
    assert Deadlines().slack_s(FakeView(0.2), [seq]) == pytest.approx(slack_s)


def test_a_short_answer_is_lost_only_when_its_objective_is():
    """Of four tokens, one out: the others have 0.3 s, of which the next one may take 0.2."""
    seq = sequence(0, output=1, sampling=SamplingParams(max_tokens=4))
    deadlines = Deadlines()
    assert deadlines.slack_s(FakeView(5.0), [seq]) == pytest.approx(0.09)
    assert deadlines.slack_s(FakeView(5.19), [seq]) == 0.0
    assert deadlines.slack_s(FakeView(5.21), [seq]) == pytest.approx(0.09)
    last = sequence(1, output=3, sampling=SamplingParams(max_tokens=4))
    last.first_token_s = 5.84
    assert deadlines.slack_s(FakeView(6.0), [last]) == pytest.approx(0.11)
    assert deadlines.slack_s(FakeView(6.13), [last]) == 0.0
    assert deadlines.slack_s(FakeView(6.15), [last]) == pytest.approx(0.09)


def test_a_long_prompt_has_its_share_of_the_slack_in_each_iteration():
    assert Deadlines().slack_s(FakeView(0.1), [sequence(0, prompt=96)]) == pytest.approx(0.3)


def test_who_is_behind_has_no_slack_as_long_as_the_objective_can_be_met():
    seq, deadlines = sequence(0, output=1), Deadlines()
    deadlines.slack_s(FakeView(5.0), [seq])
    seq.tokens += [1] * 8
    assert deadlines.slack_s(FakeView(5.95), [seq]) == 0.0
    seq.tokens += [1] * 2
    assert deadlines.slack_s(FakeView(5.95), [seq]) == pytest.approx(0.13)


def test_a_missed_deadline_moves_and_takes_the_later_ones_along():
    assert Deadlines().slack_s(FakeView(5.0), [sequence(0)]) == pytest.approx(0.09)
    seq, deadlines = sequence(0, output=1), Deadlines()
    deadlines.slack_s(FakeView(5.0), [seq])
    assert deadlines.slack_s(FakeView(6.0), [seq]) == pytest.approx(0.09)
    seq.tokens.append(1)
    assert deadlines.slack_s(FakeView(6.0), [seq]) == pytest.approx(0.18)


def test_a_deadline_that_has_moved_may_be_missed_again():
    seq, deadlines = sequence(0, output=1), Deadlines()
    deadlines.slack_s(FakeView(5.0), [seq])
    deadlines.slack_s(FakeView(6.0), [seq])  # moves: due at 6.09, by the objective at 6.11
    assert deadlines.slack_s(FakeView(6.1), [seq]) == 0.0
    assert deadlines.slack_s(FakeView(6.13), [seq]) == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("uncertainty", "wanted"), [(0.0, 1.04), (0.05, 1.05), (0.1, 1.1), (0.7, 1.2)]
)
def test_answers_aim_at_as_much_less_as_predictions_are_wrong(uncertainty, wanted):
    view = FakeView(5.0, latency=FakeLatency(uncertainty))
    assert margin(view) == pytest.approx(wanted)
    assert Deadlines().slack_s(view, [sequence(0)]) == pytest.approx(0.1 / wanted)


def test_the_next_request_may_wait_as_long_as_the_last_ones_could():
    """Their objective less their prompt's own time; hopeless ones and one of 24 do not count."""
    deadlines = Deadlines()
    assert deadlines.wait_s(FakeView(5.0)) == 1.0

    def begin(number: int, ttft_s: float, prompt: int) -> None:
        seq = sequence(number, output=1, prompt=prompt, slo=Slo(ttft_s, 0.1))
        deadlines.slack_s(FakeView(5.0), [seq])
        deadlines.slack_s(FakeView(5.0), [seq])  # counts once

    begin(0, 0.2, 100)
    begin(1, 0.2, 201)
    assert deadlines.wait_s(FakeView(5.0)) == pytest.approx(0.1)
    for number in range(2, 25):
        begin(number, 0.5, 100)
    assert deadlines.wait_s(FakeView(5.0)) == pytest.approx(0.4)
    for number in range(25, 90):
        begin(number, 2.0, 100)
    assert deadlines.wait_s(FakeView(5.0)) == pytest.approx(1.9)


def test_the_next_prompt_may_take_as_long_as_the_last_ones():
    """Hopeless ones and one of 24 do not count."""
    deadlines = Deadlines()
    assert deadlines.prompt_s(FakeView(5.0)) == 0.0
    for number, prompt in enumerate([300, 1001, *[100] * 21]):
        deadlines.slack_s(FakeView(5.0), [sequence(number, output=1, prompt=prompt)])
    assert deadlines.prompt_s(FakeView(5.0)) == pytest.approx(0.24)
    for number in range(30, 33):
        deadlines.slack_s(FakeView(5.0), [sequence(number, output=1, prompt=100)])
    assert deadlines.prompt_s(FakeView(5.0)) == pytest.approx(0.08)


def test_what_is_cached_of_a_prompt_takes_no_time():
    deadlines, seq = Deadlines(), sequence(0, output=1, prompt=600)
    seq.cached_tokens = 590
    deadlines.slack_s(FakeView(5.0), [seq])
    assert deadlines.prompt_s(FakeView(5.0)) == pytest.approx(0.008)


def test_what_is_known_of_requests_that_are_gone_is_forgotten():
    deadlines, running = Deadlines(), [sequence(number, output=1) for number in range(4)]
    deadlines.slack_s(FakeView(5.0), running)
    deadlines.forget_ended(FakeView(5.0, serving=running[:1], waiting=running[1:2]))
    assert set(deadlines._clocks) == {0, 1}
