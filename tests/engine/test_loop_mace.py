"""MACE over the fake device: who goes first, what ageing does, and what its ablation loses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learning_bench import Bench, dpo_step, request, sft_step

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.core.training import ScoreRequest
from tandem.scheduling.policies import mace


def test_decodes_go_on_beside_prompts_and_training():
    """One iteration holds all three kinds when memory allows: the hybrid batch of figure 7."""
    bench = Bench("mace", num_blocks=200, max_batch_tokens=64, recording_tokens=200)
    bench.open("t")
    bench.loop.add(request("a", (1, 2, 3), 20))
    bench.step()
    bench.loop.add(request("b", tuple(range(20)), 5))
    bench.loop.teaching.add_step(dpo_step("s", "t", [10, 10]))
    bench.step()
    spans = bench.plans[-1].spans
    assert [len(span.tokens) for span in spans[:2]] == [1, 20]
    assert [span.record is not None for span in spans[:3]] == [False, False, True]
    assert all(span.record is not None for span in spans[2:])


def test_an_aged_step_goes_before_prompts_of_its_time():
    """Memory for one of the two: the prompt wins when both are young, an old step against it."""
    for ages_s, first in ((0.0, "prompt"), (60.0, "step")):
        bench = Bench("mace", num_blocks=12, max_batch_tokens=64, recording_tokens=64)
        bench.open("t")
        bench.loop.teaching.add_step(dpo_step("s", "t", [16, 16]))
        bench.clock.advance(ages_s)
        bench.loop.add(request("r", tuple(range(30)), 2))
        bench.step()
        recorded = any(span.record is not None for span in bench.plans[0].spans)
        assert recorded == (first == "step")
        bench.run()
        assert "s" in bench.outcomes and "r" in bench.ended


def test_a_larger_loss_goes_first():
    """gamma * L_DPO decides between steps of equal age."""
    bench = Bench("mace", num_blocks=12, max_batch_tokens=64, recording_tokens=64)
    for name, urgency in (("calm", 0.1), ("urgent", 3.0)):
        bench.open(name)
        step = dpo_step(f"s-{name}", name, [16, 16])
        bench.loop.teaching.add_step(replace(step, urgency=urgency))
    bench.run()
    finished = {name: outcome.finished_s for name, outcome in bench.outcomes.items()}
    assert finished["s-urgent"] < finished["s-calm"]


def test_without_bins_training_and_inference_do_not_share_an_iteration():
    bench = Bench("mace", {"bins": "false"}, num_blocks=200, max_batch_tokens=64,
                  recording_tokens=200)  # fmt: skip
    bench.open("t")
    for number in range(3):
        bench.loop.teaching.add_step(dpo_step(f"s{number}", "t", [10, 10]))
        bench.loop.add(request(f"r{number}", (number, 1), 6))
    bench.run()
    assert len(bench.outcomes) == 3 and len(bench.ended) == 3
    for plan in bench.plans:
        assert not (trains(plan) and any(span.draws for span in plan.spans))


def test_the_hybrid_in_order_of_arrival_mixes_what_it_keeps_to_fixed_numbers():
    """Figure 13: without bins, but not apart; two answers and a step at once, the oldest."""
    options = {"bins": "false", "apart": "false", "fixed_inference": "2", "fixed_training": "1"}
    bench = Bench("mace", options, num_blocks=200, max_batch_tokens=64, recording_tokens=200)
    bench.open("t")
    for number in range(3):
        bench.loop.teaching.add_step(dpo_step(f"s{number}", "t", [10, 10]))
        bench.loop.add(request(f"r{number}", (number, 1), 6))
    bench.run()
    assert len(bench.outcomes) == 3 and len(bench.ended) == 3
    mixed = [plan for plan in bench.plans if trains(plan) and any(s.draws for s in plan.spans)]
    assert mixed
    assert max(sum(1 for span in plan.spans if span.draws) for plan in bench.plans) == 2
    assert max(len(plan.opens) for plan in bench.plans) == 1


def trains(plan) -> bool:
    return any(span.record is not None for span in plan.spans) or bool(plan.slices)


def test_a_preempted_answer_does_not_go_behind_the_queue():
    """It is the oldest, so its aged priority is the highest of all that wait."""
    bench = Bench("mace", num_blocks=13, max_sequences=2, max_batch_tokens=64, prefix_caching=False)
    for place, name in enumerate(("older", "old")):
        bench.loop.add(request(name, (place,) * 20, 12))
        bench.step()
        bench.clock.advance(0.5)
    for number in range(10):
        bench.loop.add(request(f"r{number}", (number,) * 8, 16))
    bench.run()
    assert bench.scheduler.preemptions, "nobody was preempted"
    ends = sorted(bench.ended, key=lambda name: bench.times[name][-1])
    assert ends.index("old") == 1, ends


def test_a_score_goes_before_the_update_that_it_holds_up_without_bins():
    """First in, first out: the score began beside an older request, the step is older than it."""
    bench = Bench("mace", {"bins": "false"}, num_blocks=60, max_batch_tokens=8)
    bench.open("t")
    bench.loop.add(request("r", (1, 2), 3))
    bench.step()
    bench.loop.teaching.add_step(sft_step("s", "t", [6]))
    bench.clock.advance(0.1)
    bench.loop.teaching.add_score(ScoreRequest("x", tuple(range(30)), 1, trainer="t"))
    bench.run()
    assert set(bench.outcomes) == {"s"} and set(bench.scores) == {"x"} and "r" in bench.ended
    updated = next(place for place, plan in enumerate(bench.plans) if plan.updates)
    scored = max(place for place, plan in enumerate(bench.plans) if plan.spans)
    assert scored < updated, "the update did not wait"


@pytest.mark.parametrize("bins", ["true", "false"])
def test_what_waits_for_a_slot_stops_nobody(bins):
    """The older request outranks the half-done score that has the only slot."""
    bench = Bench("mace", {"bins": bins}, max_sequences=1, max_batch_tokens=8)
    bench.loop.teaching.add_score(ScoreRequest("x", tuple(range(30)), 1))
    bench.step()
    bench.loop.add(request("r", (1, 2, 3), 4))
    bench.run()
    assert "x" in bench.scores and "r" in bench.ended


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=20), st.integers(1, 25))
def test_the_oldest_of_all_classes_are_looked_at(shapes, most):
    classes = {True: WorkClass.OFFLINE, False: WorkClass.ONLINE}
    made = [
        Sequence(n, request("r", (1,), work_class=classes[offline], arrival_s=at_s), 0, None, [1])
        for n, (offline, at_s) in enumerate(shapes)
    ]
    found = mace._oldest(sorted(made, key=lambda seq: seq.order), most)
    assert found == sorted(made, key=lambda seq: (seq.request.arrival_s, seq.seq_id))[:most]
