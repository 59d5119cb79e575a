"""The policy `unified` over the fake device: objectives are kept, and learning never starves."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from learning_bench import SLOW, Bench, request, sft_step

import tandem.scheduling.policies.unified.observe as observe
from fake_executor import Costs
from tandem.core.slo import Slo, WorkClass
from tandem.core.training import ScoreRequest
from tandem.estimators.latency import LatencyModel
from tandem.estimators.linear import MEASURED, LinearModel
from tandem.estimators.terms import FORWARD_TERMS, SLICE_TERMS
from tandem.scheduling.training import Stage


def gaps(bench: Bench, name: str) -> list[float]:
    times = bench.times[name]
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("temporal", ["false", "true"])
def test_unified_keeps_every_token_within_its_objective(temporal):
    """The time model knows nothing of the device at first; afterwards no token is late, and no
    pause exceeds the ceiling."""
    bench = Bench(
        options={"temporal_only": temporal}, num_blocks=200, max_batch_tokens=64,
        recording_tokens=200,
    )  # fmt: skip
    bench.open("t")
    for number in range(30):
        bench.loop.teaching.add_step(sft_step(f"s{number}", "t", [30, 30], [30, 30]))
    for number in range(4):
        bench.loop.add(request(f"r{number}", (number, 1, 2), 60))
    while len(bench.ended) < 4:
        bench.step()
    assert len(bench.outcomes) > 3, "nothing was learned meanwhile"
    for number in range(4):
        assert max(gaps(bench, f"r{number}")[8:]) <= 0.25 * 1.1
        times = bench.times[f"r{number}"]
        assert all(time <= 1.0 + place * 0.1 for place, time in enumerate(times) if place > 8)
    fused = [p for p in bench.plans if any(s.record for s in p.spans) and any(
        s.draws for s in p.spans)]  # fmt: skip
    assert bool(fused) == (temporal == "false")


def test_unified_never_starves_learning():
    """Requests without end fill every slot and leave no slack; learning still gets its share."""
    costs = Costs(iteration_s=0.12, token_s=0.001, slice_s=0.002, layer_token_s=0.0005)
    bench = Bench(
        options={"patience_s": "5", "min_share": "0.1"}, num_blocks=40, max_sequences=4,
        max_batch_tokens=16, costs=costs,
    )  # fmt: skip
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("s", "t", [30], [30]))
    number = 0
    while "s" not in bench.outcomes:
        while bench.scheduler.state.num_waiting < 4:
            bench.loop.add(request(f"r{number}", (number % 40, *range(20)), 16))
            number += 1
        bench.step()
        assert bench.clock.now() < 60.0, "learning starves"
    assert bench.clock.now() > 2.0 and bench.loop.stats().generation_tokens > 100


def test_unified_works_through_steps_by_urgency_and_age():
    bench = Bench()
    for name in "tuv":
        bench.open(name)
    bench.loop.teaching.add_step(sft_step("calm", "t", [30], urgency=0.1))
    bench.loop.teaching.add_step(sft_step("urgent", "u", [30], urgency=3.0))
    bench.run()
    assert list(bench.outcomes) == ["urgent", "calm"]
    bench.loop.teaching.add_step(sft_step("old", "t", [30], urgency=0.1))
    bench.clock.advance(100.0)
    bench.loop.teaching.add_step(sft_step("new", "u", [30], urgency=3.0))
    bench.run()
    assert list(bench.outcomes)[2:] == ["old", "new"]


def test_unified_spends_saved_slack_in_passes_up_to_its_ceiling():
    """A request far ahead of its objective leaves seconds; layers of 0.11 s run two at a time."""
    costs = Costs(iteration_s=0.01, token_s=1e-4, slice_s=1e-3, layer_token_s=0.11 / 58)
    bench = Bench(num_blocks=200, max_batch_tokens=64, recording_tokens=200, costs=costs)
    bench.open("t")
    for number in range(8):
        bench.loop.teaching.add_step(sft_step(f"s{number}", "t", [30, 30]))
    bench.loop.add(request("r", (1, 2), 60, slo=Slo(ttft_s=1.0, tpot_s=0.4)))
    while "r" not in bench.ended:
        bench.step()
    pauses = gaps(bench, "r")[8:]
    assert 0.15 < max(pauses) <= 0.25 * 1.1
    assert any(plan.slices and not plan.spans for plan in bench.plans)


def test_unified_gives_less_away_the_less_its_predictions_hold_up_to_a_fifth():
    def granted_rows(error: float) -> int:
        costs = Costs(iteration_s=0.02, token_s=0.002)
        bench = Bench(
            options={"temporal_only": "true"}, num_blocks=200, max_batch_tokens=64,
            recording_tokens=200, costs=costs,
        )  # fmt: skip
        bench.open("t")
        bench.loop.teaching.add_step(sft_step("before", "t", [30, 20], [10]))
        bench.run()
        bench.loop.add(request("r", (1, 2), 150, slo=Slo(ttft_s=1.0, tpot_s=0.1)))
        bench.step()
        bench.loop.teaching.add_step(sft_step("s", "t", [30, 30]))
        bench.scheduler.latency.forward.errors.mean = error
        bench.step()
        return sum(len(span.tokens) for span in bench.plans[-1].spans if span.record)

    assert granted_rows(0.0) > granted_rows(0.2) == granted_rows(0.9) > 0


def test_a_request_that_was_late_once_saves_up_slack_again():
    """Its first token misses the objective by seconds; learning still gets long passes."""
    costs = Costs(iteration_s=0.02, token_s=0.001)
    bench = Bench(num_blocks=200, max_batch_tokens=64, recording_tokens=200, costs=costs)
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("before", "t", [30, 20], [10]))
    bench.run()
    bench.loop.add(request("r", (1, 2), 200, slo=Slo(ttft_s=0.001, tpot_s=0.06)))
    bench.clock.advance(5.0)  # nobody came to it
    for number in range(12):
        bench.loop.teaching.add_step(sft_step(f"s{number}", "t", [60, 60]))
    while "r" not in bench.ended:
        bench.step()
    late = gaps(bench, "r")[8:]
    assert max(late) > 1.2 * 0.06, "no slack was saved up"
    assert sum(late) / len(late) <= 0.06 * 1.1


def test_in_turns_learning_has_every_other_iteration():
    bench = Bench(options={"temporal_only": "true"}, num_blocks=200, max_batch_tokens=64)
    bench.open("t")
    bench.loop.add(request("r", (1, 2), 150, slo=Slo(ttft_s=1.0, tpot_s=0.5)))
    for number in range(20):
        bench.loop.teaching.add_step(sft_step(f"s{number}", "t", [30]))
    while len(bench.tokens.get("r", ())) < 60:
        bench.step()
    learns = [not any(span.draws for span in plan.spans) for plan in bench.plans[20:80]]
    assert sum(learns) == 30 and all(one != two for one, two in pairwise(learns))


def test_learning_that_comes_is_looked_at_whatever_was_there_before():
    """Offline requests beside online ones leave nothing behind: neither debts nor a pause."""
    bench = Bench(num_blocks=200, costs=Costs(iteration_s=0.01, token_s=1e-4))
    bench.loop.add(request("r", (1, 2), 100, slo=Slo(ttft_s=1.0, tpot_s=0.5)))
    bench.loop.add(request("o", (3, 4), 20, work_class=WorkClass.OFFLINE))
    bench.open("t")
    while "o" not in bench.ended:
        bench.step()
    bench.step()
    bench.loop.teaching.add_step(sft_step("s", "t", [30]))
    bench.step()
    assert any(span.record for span in bench.plans[-1].spans)


@pytest.mark.parametrize(("iteration_s", "most"), [(0.005, 1 / 6), (0.04, 1 / 2)])
def test_learning_that_gets_nothing_is_looked_at_less_often(monkeypatch, iteration_s, most):
    """In few iterations, and after 0.1 s at the latest; at once when nobody runs."""
    looked: list[float] = []

    def look(view, *rest):
        looked.append(view.now)
        return found(view, *rest)

    found = observe.learning_items
    monkeypatch.setattr(observe, "learning_items", look)
    monkeypatch.setattr(observe, "_TRIAL_S", math.inf)
    costs = Costs(iteration_s=iteration_s, token_s=1e-4)
    bench = Bench(options={"min_share": "1e-6"}, num_blocks=200, costs=costs)
    bench.open("t")
    bench.loop.add(request("r", (1, 2), 150, slo=Slo(ttft_s=1.0, tpot_s=1e-4)))
    bench.step()
    bench.loop.teaching.add_step(sft_step("s", "t", [30]))
    began_s, before = bench.clock.now(), len(bench.plans)
    while "r" not in bench.ended:
        bench.step()
    served = [at_s for at_s in looked if at_s < bench.clock.now()]
    assert 2 <= len(served) < 16 + most * (len(bench.plans) - before)
    assert max(late - early for early, late in pairwise([began_s, *served])) < 0.1 + 2 * iteration_s
    bench.step()
    assert any(span.record for span in bench.plans[-1].spans), "nobody runs any more"


def test_unified_tries_what_seems_never_to_fit():
    """Predictions of a busy hour are a thousand times too long; nothing is earned to test them."""
    bench = Bench(
        options={"min_share": "1e-6", "patience_s": "0.2"}, num_blocks=200, max_batch_tokens=64,
        recording_tokens=200,
    )  # fmt: skip
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("before", "t", [30, 30]))
    bench.run()
    latency = bench.scheduler.latency = LatencyModel(bench.scheduler.latency.rates)
    of_recording = FORWARD_TERMS.index("recording") - 2  # `longest` and `mean` are part of another
    costs = list(latency.forward.coefficients)
    costs[of_recording] = 60.0
    latency.forward = LinearModel(costs, MEASURED)
    latency.backward = LinearModel([60.0] * len(SLICE_TERMS), MEASURED)
    for number in range(8):
        bench.loop.teaching.add_step(sft_step(f"s{number}", "t", [30, 30]))
    for number in range(6):
        name = f"r{number}"
        bench.loop.add(request(name, (1, 2), 60, slo=Slo(ttft_s=1.0, tpot_s=0.3)))
        while name not in bench.ended:
            bench.step()
    assert len(bench.outcomes) > 3


@pytest.mark.parametrize("temporal", ["false", "true"])
@pytest.mark.parametrize("rows", [8, 16])
def test_overdue_learning_that_stands_in_the_way_goes_on(temporal, rows):
    """It is half computed and keeps its blocks; the prompt takes longer than an iteration beside
    learning may, and does not fit beside it. Nobody was waited for without end."""
    options = {"patience_s": "0.05", "min_share": "1", "temporal_only": temporal}
    bench = Bench(options=options, num_blocks=13, max_batch_tokens=rows, costs=SLOW)
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("s", "t", [42], [42]))
    bench.clock.advance(1.0)
    while not any(span.record for plan in bench.plans for span in plan.spans):
        bench.step()
    bench.loop.add(request("r", tuple(range(42)), 4))
    bench.run()
    assert bench.outcomes["s"].applied and "r" in bench.ended
    recomputed = [span for plan in bench.plans for span in plan.spans if span.adapter]
    assert sum(len(span.tokens) for span in recomputed) == 2 * 41, "learning was preempted"
    longest = max(plan.num_tokens for plan in bench.plans)
    pauses = [0.02 + 0.02 * longest] * (len(bench.plans) + 10)
    assert bench.clock.now() < 1.0 + sum(pauses), "time passed in vain"


def test_overdue_learning_keeps_its_blocks_in_iterations_that_it_has_no_part_of():
    """An answer grows in its turns until there are none left."""
    options = {"patience_s": "0.01", "min_share": "1", "temporal_only": "true"}
    bench = Bench(options=options, num_blocks=13, max_batch_tokens=4, costs=SLOW)
    bench.open("t")
    bench.loop.add(request("r", tuple(range(10)), 28))
    bench.step()
    bench.loop.teaching.add_step(sft_step("s", "t", [34]))
    bench.clock.advance(1.0)
    bench.run()
    assert bench.outcomes["s"].applied and len(bench.tokens["r"]) == 28
    forwarded = [span for plan in bench.plans for span in plan.spans if span.adapter]
    assert sum(len(span.tokens) for span in forwarded) == 33, "learning was preempted"
    assert bench.scheduler.preemptions > 0, "there were blocks for both"


@pytest.mark.parametrize("temporal", ["false", "true"])
def test_a_score_that_may_not_start_does_not_hold_up_the_update_that_it_waits_for(temporal):
    """The update takes longer than an iteration of learning may, and is less urgent."""
    costs = Costs(iteration_s=0.02, token_s=0.001, update_s=2.0)
    bench = Bench(options={"temporal_only": temporal}, costs=costs)
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("before", "t", [10]))
    bench.run()
    bench.loop.teaching.add_step(sft_step("s", "t", [10], urgency=0.1))
    while bench.scheduler.learning.heads[0].stage is not Stage.UPDATE:
        bench.step()
    bench.loop.teaching.add_score(ScoreRequest("x", (1, 2, 3), 1, trainer="t"))
    bench.run()
    assert bench.outcomes["s"].applied and "x" in bench.scores
