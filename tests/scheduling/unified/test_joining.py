"""Which waiting prompts join a pass: short ones do not wait for the end of long ones behind them,
while a queue shares the constant cost of a pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_executor import FakeExecutor
from rates import slice_rates
from tandem.core.request import Request
from tandem.core.sequence import Sequence
from tandem.core.slo import Slo, WorkClass
from tandem.core.training import ScoreRequest
from tandem.estimators.latency import LatencyModel, Rates
from tandem.kv.cache import KVCache
from tandem.scheduling.policies.unified.deadlines import Deadlines
from tandem.scheduling.policies.unified.online import Load, OnlinePass
from tandem.scheduling.registry import build_policy
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets

# A pass takes 10 ms and 1 ms a row; a first token is in time after 200 ms.
RATES = Rates((0.01, 1e-9, 1e-9, 1e-9, 1e-9, 1e-3, *[1e-9] * 8), slice_rates(), 0.01, 1.0, True)
SLO = Slo(0.2, 0.05)
BUDGETS = Budgets(256, 1024)
NOW = 100.0


@dataclass
class Stage:
    """What is read of a view."""

    now: float = 0.0
    default_slo: Slo = SLO
    latency: LatencyModel = field(default_factory=lambda: LatencyModel(RATES))
    budgets: Budgets = BUDGETS
    cached: int = 0

    @property
    def kv(self) -> Stage:
        return self

    def match(self, seq: Sequence) -> int:
        return self.cached

    def slo(self, seq: Sequence) -> Slo:
        return seq.request.slo or self.default_slo


def prompts(*lengths: int, slo: Slo | None = None) -> list[Sequence]:
    found = []
    for number, length in enumerate(lengths):
        request = Request(str(number), (1,) * length, slo=slo)
        found.append(Sequence(number, request, 0, None, [1] * length))
    return found


def decoding(count: int) -> list[Sequence]:
    running = prompts(*[20] * count)
    for seq in running:
        seq.computed = len(seq.tokens) - 1
    return running


def joined(
    queue: list[Sequence],
    running: list[Sequence] | None = None,
    busy: float = 0.0,
    owed: Sequence | None = None,
    **view: object,
) -> int:
    """How many join; they are the first ones."""
    found = OnlinePass.of(Stage(**view), running or [], queue, busy, owed).joining
    assert found == queue[: len(found)]
    return len(found)


def test_a_short_prompt_does_not_wait_for_a_part_of_a_long_one():
    assert joined(prompts(50, 1000)) == 1
    assert joined(prompts(50, 1000), decoding(8)) == 1
    assert joined(prompts(1000, 50)) == 1, "of the second only a part fits"
    assert joined(prompts(600, 300)) == 1


def test_the_first_of_the_queue_always_joins_unless_a_prompt_ends_before_it():
    assert joined(prompts(5000, 50)) == 1
    half = prompts(1100)
    half[0].computed = 1000
    assert joined(prompts(900), half) == 0, "the first token of a hundred rows comes first"
    half[0].computed = 0  # it does not end in this pass, and leaves no row
    assert joined(prompts(900), half) == 0


def test_in_passes_that_are_short_for_the_objective_prompts_are_together():
    assert joined(prompts(20, 15, 10)) == 3
    assert joined(prompts(50, 300), default_slo=Slo(2.0, 0.05)) == 2
    assert joined(prompts(50, 300, slo=Slo(2.0, 0.05))) == 2, "its own objective"
    assert joined(prompts(50, 300)) == 1


def test_the_objectives_that_count_are_of_those_who_would_wait():
    tight, loose = Slo(0.1, 0.05), Slo(10.0, 0.05)
    assert joined([*prompts(50, slo=tight), *prompts(900, slo=loose)]) == 1
    assert joined([*prompts(900, slo=loose), *prompts(50, slo=tight)]) == 2
    assert joined(prompts(50, slo=tight), prompts(900, slo=loose)) == 1
    assert joined(prompts(50, slo=loose), prompts(900, slo=tight)) == 0, "it has begun"
    assert joined([*prompts(9, slo=tight), *prompts(9, 800, slo=loose)]) == 2


def test_what_costs_less_than_it_saves_joins():
    assert joined(prompts(900, 9)) == 2
    assert joined(prompts(900, 12)) == 1
    assert joined(prompts(900, 12, 500)) == 2, "two save the constant cost of a pass"


def test_a_long_queue_shares_passes():
    assert joined(prompts(*[100] * 60)) >= 5
    assert joined(prompts(*[100] * 3)) == 1


def answers(*spare_s: float, done: int = 4, late: bool = False) -> list[Sequence]:
    """Answers of `done` tokens at `NOW` whose next one is due in so many seconds; with `late` their
    first one was late."""
    running = decoding(len(spare_s))
    for seq, left_s in zip(running, spare_s, strict=True):
        seq.tokens += [1] * done
        seq.computed = len(seq.tokens) - 1
        seq.first_token_s = NOW + left_s - done * SLO.tpot_s
        arrival_s = seq.first_token_s - (0.3 if late else 0.1)
        seq.request = replace(seq.request, arrival_s=arrival_s)
    return running


def joined_in_a_rush(
    queue: list[Sequence], running: list[Sequence], owed: Sequence | None = None
) -> int:
    return joined(queue, running, 0.6, owed, now=NOW)


def test_in_a_rush_prompts_wait_where_an_answer_would_be_late():
    """Of 20 rows each: passes of 30 and 50 ms."""
    few, one, both = answers(0.1, 0.025), answers(0.1, 0.04), answers(0.1, 0.06)
    found = [joined_in_a_rush(prompts(20, 20, 20), running) for running in (few, one, both)]
    assert found == [0, 1, 2]
    assert joined(prompts(20, 20, 20), few, 0.4, now=NOW) == 2, "no rush"
    assert joined_in_a_rush(prompts(20), []) == 1
    assert joined_in_a_rush(prompts(20), prompts(200)) == 1, "no answer yet"


def test_an_answers_own_objective_says_when_it_is_late():
    patient = answers(0.01)
    patient[0].request = replace(patient[0].request, slo=Slo(0.2, 0.2))
    assert joined_in_a_rush(prompts(20), patient) == 1


def test_nobody_waits_for_answers_that_are_late_already():
    assert joined_in_a_rush(prompts(20), answers(-0.001)) == 1
    assert joined_in_a_rush(prompts(20), answers(0.01, late=True)) == 1
    assert joined_in_a_rush(prompts(20), [*answers(-0.001), *answers(0.01)]) == 0


def test_a_prompt_counts_with_all_of_its_rows_in_a_rush():
    """A pass has 1,024 rows; of 1,100 the rest takes 86 ms more."""
    assert joined_in_a_rush(prompts(1100), answers(1.08, done=30)) == 0
    assert joined_in_a_rush(prompts(1100), answers(1.15, done=30)) == 1
    full = answers(*[0.1] * 1001)
    assert joined_in_a_rush(prompts(200), full) == 0, "23 rows of it would fit"
    assert joined_in_a_rush(prompts(30), full) == 1


def test_a_request_that_is_owed_its_start_waits_for_no_answer():
    queue, running = prompts(20, 20, 20), answers(0.01)
    assert joined_in_a_rush(queue, running) == 0
    assert joined_in_a_rush(queue, running, queue[0]) == 1
    assert joined_in_a_rush(queue, running, queue[1]) == 0, "it stands behind another"


def test_nobody_waits_for_an_answer_whose_decodes_leave_prompts_no_room():
    """Decodes of 10 ms leave 17.4 and 16% of the time."""
    found = []
    for tpot_s in (0.0121, 0.0119):
        running = answers(0.01, 0.09)
        running[0].first_token_s = NOW + 0.01 - 4 * tpot_s
        arrival_s = running[0].first_token_s - 0.1
        running[0].request = replace(running[0].request, arrival_s=arrival_s, slo=Slo(0.2, tpot_s))
        found.append(joined_in_a_rush(prompts(20, 30, 30), running))
    assert found == [0, 2], "but for the other one's sake"


def test_what_a_prompt_waits_for_is_nobody_elses():
    """The next token is due in 40 ms, the prompt's first in 200, of which its pass takes 70."""
    view, running, queue = Stage(NOW), answers(0.06), prompts(60)
    queue[0].request = replace(queue[0].request, arrival_s=NOW)
    held = OnlinePass.of(view, running, queue, 0.6)
    assert held.protects and not held.joining
    assert held.due_s(view, Deadlines()) == held.seconds == pytest.approx(0.01, rel=1e-3)
    alone = OnlinePass.of(view, running, [], 0.6)
    assert alone.seconds == held.seconds and alone.due_s(view, Deadlines()) > 0.01
    free = OnlinePass.of(view, running, queue, 0.4)
    assert not free.protects and free.joining


def test_nobody_waits_for_offline_answers():
    running = answers(0.01)
    running[0].request = replace(running[0].request, work_class=WorkClass.OFFLINE)
    assert joined_in_a_rush(prompts(20), running) == 1


def test_answers_that_were_preempted_wait_for_no_other():
    begun = prompts(20)
    begun[0].tokens += [1]
    assert joined_in_a_rush(begun, answers(0.01)) == 1


def test_the_busier_the_more_share_a_pass():
    """30 rows behind 100: they save 10 ms for who waits, and cost the hundred 30 ms."""
    wanted = {0.0: 1, 0.4: 1, 0.5: 2, 1.0: 2}
    assert {busy: joined(prompts(100, 30), busy=busy) for busy in wanted} == wanted
    assert joined(prompts(50, 1000), busy=0.8) == 1, "it would be cut in two"
    assert joined(prompts(50, 1000), busy=0.95) == 2
    assert joined(prompts(*[100] * 9), busy=1.0) == 9
    view, queue = Stage(), prompts(100, 30)
    assert OnlinePass.of(view, [], queue, 0.5).joining == queue
    assert OnlinePass.of(view, [], queue, 0.0).joining == queue[:1]


@pytest.mark.parametrize(("rows", "wanted"), [(0, 3), (1000, 3), (1010, 2), (1024, 0)])
def test_no_more_join_than_there_are_rows(rows, wanted):
    loose = Slo(9.0, 1.0)
    assert joined(prompts(10, 10, 10), decoding(rows), default_slo=loose) == wanted


def test_cached_rows_count_for_nothing():
    assert joined(prompts(50, 1000), cached=990) == 2
    assert joined(prompts(*[1000] * 9), cached=992, default_slo=Slo(9.0, 1.0)) == 9


def test_an_answer_that_has_begun_and_offline_requests_join_while_there_are_rows():
    begun = prompts(50, 900)
    begun[1].tokens.append(1)
    assert joined(begun) == 2
    offline = prompts(50)
    request = Request("offline", (1,) * 900, work_class=WorkClass.OFFLINE)
    assert joined([*offline, Sequence(9, request, 0, None, [1] * 900)]) == 2


def test_what_is_held_back_needs_time_for_its_own_pass():
    """190 ms until its first token is due, of which its pass takes 160."""
    view, queue = Stage(now=0.01), prompts(50, 150)
    found = OnlinePass.of(view, [], queue, 0.0)
    assert found.joining == queue[:1] and found.deferred == queue[1:]
    assert found.work.tokens == 50 and found.seconds == pytest.approx(0.06, rel=1e-3)
    assert found.due_s(view, Deadlines()) == pytest.approx(0.06, rel=1e-3), (
        "30 ms, but never less than the pass takes"
    )
    view.default_slo = Slo(0.3, 0.05)
    found = OnlinePass.of(view, [], prompts(80, 150), 0.0)
    assert found.due_s(view, Deadlines()) == pytest.approx(0.29 - 0.16, rel=1e-3)


def test_all_that_is_held_back_counts():
    view = Stage(default_slo=Slo(0.5, 0.05))
    found = OnlinePass.of(view, [], prompts(80, 150, 100), 0.0)
    assert len(found.joining) == 1
    assert found.due_s(view, Deadlines()) == pytest.approx(0.5 - 0.26, rel=1e-3), (
        "both, in one pass"
    )
    urgent = [*prompts(80, 150), *prompts(100, slo=Slo(0.4, 0.05))]
    assert OnlinePass.of(view, [], urgent, 0.0).due_s(view, Deadlines()) == pytest.approx(
        0.4 - 0.26, rel=1e-3
    )
    narrow = replace(view, budgets=Budgets(256, 200))
    found = OnlinePass.of(narrow, [], prompts(80, 150, 190), 0.0)
    assert len(found.joining) == 1
    assert found.due_s(narrow, Deadlines()) == pytest.approx(0.5 - 0.21, rel=1e-3), (
        "as many rows as a pass has"
    )
    view.default_slo = Slo(5.0, 0.05)
    queue = [*prompts(80, 150, 1000), *prompts(9, slo=Slo(0.2, 0.05))]
    found = OnlinePass.of(view, prompts(100, slo=Slo(0.3, 0.05)), queue, 0.0)
    assert not found.joining
    assert found.due_s(view, Deadlines()) == pytest.approx(0.3), (
        "a batch of rows, the last one is not of it"
    )


@pytest.mark.parametrize("learning", [False, True])
def test_unified_asks(learning):
    info = replace(FakeExecutor(200, 16, max_model_len=2000).info, eos_token_ids=())
    scheduler = Scheduler(
        build_policy("unified"), KVCache(200, 16), BUDGETS, info, default_slo=SLO, rates=RATES
    )
    for number, length in enumerate((50, 900)):
        scheduler.add(Request(str(number), tuple(range(length))), None)
    if learning:
        scheduler.learning.add_score(ScoreRequest("lesson", (1,) * 500, 1), None, 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [len(span.tokens) for span in plan.lanes[0].spans] == [50]


@pytest.mark.parametrize("learning", [False, True])
def test_unified_asks_how_busy_the_device_is(learning, monkeypatch):
    info = replace(FakeExecutor(200, 16, max_model_len=2000).info, eos_token_ids=())
    for busy, wanted in ((0.0, [100]), (0.9, [100, 30])):
        monkeypatch.setattr(Load, "busy", busy)
        scheduler = Scheduler(
            build_policy("unified"), KVCache(200, 16), BUDGETS, info, default_slo=SLO, rates=RATES
        )
        for number, length in enumerate((100, 30)):
            scheduler.add(Request(str(number), (number, *range(2, length + 1))), None)
        if learning:
            scheduler.learning.add_score(ScoreRequest("lesson", (1,) * 500, 1), None, 0.0)
        plan = scheduler.schedule(0.0)
        assert plan is not None
        assert [len(span.tokens) for span in plan.lanes[0].spans] == wanted


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_pass_by_pass_all_of_a_queue_end(lengths):
    queue, running, passes = prompts(*lengths), [], 0
    while queue or running:
        running += (found := OnlinePass.of(Stage(), running, queue, 0.0).joining)
        queue, left = queue[len(found) :], 1024
        for seq in running:
            taken = min(left, len(seq.tokens) - seq.computed)
            seq.computed += taken
            left -= taken
        assert left < 1024, "a pass without any rows"
        running = [seq for seq in running if seq.computed < len(seq.tokens)]
        passes += 1
    assert passes <= len(lengths) + sum(lengths) // 1024 + 1
