"""Training and scores beside requests, over an executor that asserts every rule of a plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from learning_bench import (
    POLICIES,
    Bench,
    bench_of,
    check_answer,
    dpo_step,
    kto_step,
    request,
    sft_step,
)

from fake_answers import expected_score
from fake_executor import LanePlan
from tandem.core.errors import InvalidRequest, NotFound
from tandem.core.plan import Discard, working_key
from tandem.core.training import LossSpec, ScoreRequest, TrainingStep
from tandem.training.losses import micro_batch_loss, step_items


def weights_of(bench: Bench, trainer: str) -> str:
    return f"{working_key(trainer)}#{bench.executor.trainers[trainer].weights}"


def check_outcome(bench: Bench, step: TrainingStep, weights: str) -> None:
    """Log-probs are those of the weights before the update, the loss is theirs."""
    outcome = bench.outcomes[step.step_id]
    assert outcome.applied and outcome.problem is None
    items = step_items(step.loss, step.micro_batches)
    loss = 0.0
    for sequences, logprobs in zip(step.micro_batches, outcome.logprobs, strict=True):
        for sequence, logprob in zip(sequences, logprobs, strict=True):
            wanted = expected_score(sequence.tokens, sequence.prompt_tokens, weights)
            assert logprob == pytest.approx(wanted, rel=1e-12)
        loss += micro_batch_loss(step.loss, sequences, logprobs, items).loss
    assert outcome.loss == pytest.approx(loss, rel=1e-12)
    assert outcome.arrival_s <= outcome.started_s <= outcome.finished_s


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "make", [lambda n: sft_step(n, "t", [20, 9], [30]), lambda n: dpo_step(n, "t", [9, 14]),
             lambda n: kto_step(n, "t", [12, 9, 7])],
    ids=["sft", "dpo", "kto"],
)  # fmt: skip
def test_steps_train_beside_requests(policy, make):
    bench = bench_of(policy)
    bench.open("t")
    asked = [request(f"r{i}", (i, 1, 2), 20) for i in range(3)]
    before = [weights_of(bench, "t")]
    for each in asked:
        bench.loop.add(each)
    steps = [make(f"s{i}") for i in range(3)]
    for step in steps:
        bench.loop.teaching.add_step(step)
    while len(bench.outcomes) < 3:
        known = len(bench.outcomes)
        bench.step()
        if len(bench.outcomes) > known:
            before.append(weights_of(bench, "t"))
    bench.run()
    for step, weights in zip(steps, before, strict=False):
        check_outcome(bench, step, weights)
    assert [bench.outcomes[f"s{i}"].revision for i in range(3)] == [1, 2, 3]
    assert len(set(before)) == 4
    for each in asked:
        check_answer(bench, each)
    stats = bench.loop.stats()
    assert stats.training_steps == 3 and stats.training_waiting == 0
    assert stats.training_tokens == sum(step.num_tokens for step in steps)


def test_no_retraining_serves_and_scores_but_never_trains():
    bench = Bench("no_retrain")
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("s", "t", [10]))
    bench.loop.add(request("r", (1, 2, 3)))
    bench.loop.teaching.add_score(ScoreRequest("x", (1, 2, 3), 1, trainer="t"))
    bench.run()
    assert "r" in bench.ended and "x" in bench.scores and not bench.outcomes
    assert not bench.loop.has_work and bench.loop.stats().training_waiting == 1
    bench.cancel("t")
    assert bench.loop.stats().training_waiting == 0


def test_a_trained_step_is_never_forwarded_beside_one_that_is_not_updated():
    bench = Bench()
    bench.open("t")
    for name in "ab":
        bench.loop.teaching.add_step(sft_step(name, "t", [20], [20]))
    bench.run()
    order = [
        *(kind for plan in bench.plans for kind in
          ["open"] * len(plan.opens) + ["update"] * len(plan.updates))
    ]  # fmt: skip
    assert order == ["open", "open", "update"] * 2


def test_cancelled_steps_are_discarded_in_the_next_plan_and_others_go_on():
    bench = Bench()
    for name in "tu":
        bench.open(name)
        bench.loop.teaching.add_step(sft_step(name, name, [20], [20]))
    while not any(plan.slices for plan in bench.plans):
        bench.step()
    planned = len(bench.plans)
    bench.cancel("t")
    bench.loop.teaching.add_step(sft_step("again", "t", [10]))
    bench.run()
    assert [d.trainer for d in bench.plans[planned].discards] == ["t"]
    assert bench.cancelled == {"t"} and set(bench.outcomes) == {"u", "again"}
    assert bench.outcomes["again"].revision == 1


def test_a_step_that_was_not_begun_needs_no_discard():
    bench = Bench()
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("s", "t", [20]))
    bench.cancel("t")
    assert not bench.loop.has_work
    assert all(not plan.discards for plan in bench.plans)


@pytest.mark.parametrize("kind", ["sequence", "nan", "slice", "update", "iteration"])
def test_a_step_that_fails_ends_alone(kind):
    bench = Bench()
    for name in "tu":
        bench.open(name)
    bench.loop.teaching.add_step(sft_step("bad", "t", [20, 10]))  # sequences 0 and 1, micro-batch 0
    bench.loop.teaching.add_step(sft_step("good", "u", [20]))
    bench.loop.teaching.add_step(sft_step("next", "t", [20]))
    bench.loop.add(asked := request("r", (1, 2, 3), 20))
    bench.executor.failing = {1} if kind == "sequence" else set()
    bench.executor.nan_scores = {1} if kind == "nan" else set()
    bench.executor.failing_slices = {0} if kind == "slice" else set()
    bench.executor.failing_updates = {"t"} if kind == "update" else set()
    boom = [kind == "iteration"]

    def explode(plan: LanePlan) -> None:
        bench.plans.append(plan)
        if plan.slices and boom.pop() if boom else False:
            raise RuntimeError("out of memory")

    bench.executor._on_submit = explode
    while "bad" not in bench.outcomes and "good" not in bench.outcomes:
        bench.step()
    bench.executor.failing_updates = set()
    bench.run()
    failed = [name for name, outcome in bench.outcomes.items() if not outcome.applied]
    assert failed == ["bad"] or (kind == "iteration" and failed)
    assert bench.outcomes["bad"].problem and bench.outcomes["next"].revision == 1
    if kind in ("sequence", "nan", "slice"):
        assert math.isnan(bench.outcomes["bad"].loss)
        discards = [d for plan in bench.plans for d in plan.discards]
        assert discards == [Discard("t", (0,))]
    if kind != "iteration":
        check_answer(bench, asked)
        assert bench.outcomes["good"].applied


def test_a_non_finite_loss_ends_the_step():
    bench = Bench()
    bench.open("t")
    step = dpo_step("s", "t", [10])
    chosen, rejected = step.micro_batches[0]
    broken = type(chosen)(chosen.tokens, 2, chosen.role, reference=math.inf)
    loss = LossSpec(step.loss.kind)
    bench.loop.teaching.add_step(TrainingStep("s", "t", loss, ((broken, rejected),)))
    bench.run()
    assert not bench.outcomes["s"].applied and "finite" in (bench.outcomes["s"].problem or "")


def test_what_can_never_run_is_refused_with_numbers():
    bench = Bench(num_blocks=12, recording_tokens=30)
    with pytest.raises(NotFound, match="open it first"):
        bench.loop.teaching.add_step(sft_step("s", "t", [10]))
    bench.open("t")
    with pytest.raises(InvalidRequest, match=r"38 rows, .* 30 at once"):
        bench.loop.teaching.add_step(sft_step("s", "t", [20, 20]))
    with pytest.raises(InvalidRequest, match="holds 48"):
        bench.loop.teaching.add_score(ScoreRequest("x", (1,) * 50, 1))
    with pytest.raises(InvalidRequest, match="nothing to learn"):
        bench.loop.teaching.add_step(TrainingStep("s", "t", sft_step("s", "t", [5]).loss, ()))
    with pytest.raises(InvalidRequest, match="no completion"):
        bench.loop.teaching.add_score(ScoreRequest("x", (1, 2), 2))
    with pytest.raises(InvalidRequest, match="no room for recordings"):
        other = Bench(recording_tokens=0)
        other.open("t")
        other.loop.teaching.add_step(sft_step("s", "t", [5]))
    assert not bench.loop.has_work


def test_an_update_waits_for_scores_that_began_under_the_old_parameters():
    bench = Bench(max_batch_tokens=8)
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("s", "t", [6]))
    tokens = tuple(range(40))
    for number in range(3):
        bench.loop.teaching.add_score(ScoreRequest(f"x{number}", tokens, 1, trainer="t"))
    before = weights_of(bench, "t")
    bench.run()
    after = weights_of(bench, "t")
    wanted = [expected_score(tokens, 1, weights) for weights in (before, after)]
    for score in bench.scores.values():
        assert any(score.logprob == pytest.approx(value, rel=1e-12) for value in wanted)


def test_scores_take_the_prefix_but_not_what_they_score():
    bench = Bench()
    tokens = tuple(range(30))
    bench.loop.teaching.add_score(ScoreRequest("a", tokens, 20))
    bench.run()
    bench.loop.teaching.add_score(ScoreRequest("b", tokens, 20))
    planned = len(bench.plans)
    bench.run()
    again = [span for plan in bench.plans[planned:] for span in plan.spans]
    assert [span.start for span in again] == [16]  # row 19 says how likely token 20 is
    assert again[0].score_targets == (-1, -1, -1, *tokens[20:]) and again[0].score_top is None
    assert bench.scores["a"].logprob == bench.scores["b"].logprob
    assert bench.scores["a"].tokens == 10 and bench.scores["a"].adapter is None


def test_training_leaves_nothing_in_the_prefix_cache():
    bench = Bench()
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("s", "t", [30]))
    bench.loop.teaching.add_score(ScoreRequest("x", tuple(range(30)), 5, trainer="t"))
    bench.run()
    assert bench.cache.cached_blocks == 0
    assert bench.loop.stats().prefix_queries_tokens == 0


def test_recorded_rows_survive_preemption():
    bench = Bench("priority", num_blocks=14, max_sequences=2, max_batch_tokens=10)
    bench.open("t")
    weights = weights_of(bench, "t")
    bench.loop.teaching.add_step(step := sft_step("s", "t", [40]))
    bench.step()
    bench.loop.add(request("r", (1,) * 20, 20))
    bench.run()
    recorded = sum(len(s.tokens) for p in bench.plans for s in p.spans if s.record is not None)
    forwarded = sum(len(s.tokens) for p in bench.plans for s in p.spans if s.adapter is not None)
    assert recorded == 39 < forwarded, "the sequence was preempted, its rows recorded once"
    check_outcome(bench, step, weights)


def test_ekya_waits_for_its_interval_and_then_inference_waits():
    bench = Bench("ekya", {"interval_s": "3"})
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("s", "t", [20]))
    assert not bench.loop.step()
    assert not bench.loop.has_work and bench.loop.pause_s == pytest.approx(3.0, abs=0.01)
    bench.step()
    bench.loop.add(request("r", (1, 2), 4))
    while "s" not in bench.outcomes:
        bench.step()
    assert "r" not in bench.tokens and bench.outcomes["s"].started_s >= 3.0
    bench.run()
    assert "r" in bench.ended


def test_adainf_trains_whole_steps_before_anybody_is_served():
    bench = Bench("adainf")
    bench.open("t")
    bench.open("u")
    bench.loop.add(request("r", (1, 2), 4))
    for name in "tu":
        bench.loop.teaching.add_step(sft_step(name, name, [20], [20]))
    while len(bench.outcomes) < 2:
        assert "r" not in bench.tokens
        bench.step()
    assert bench.outcomes["t"].finished_s <= bench.outcomes["u"].started_s
    bench.run()


# ---------------------------------------------------------------- staging and publishing


def test_a_snapshot_becomes_a_version_without_reading_files(tmp_path: Path):
    bench = Bench()
    bench.open("t", seed=3)
    snapshot = bench.executor.snapshot_trainer("t")
    snapshot.write(str(tmp_path / "v"))
    bench.executor.read_adapter = None  # type: ignore[assignment]  # nothing may be read
    candidate = bench.loop.adapters.adopt(snapshot, "candidate", str(tmp_path / "v"), "abc")
    published = bench.loop.adapters.publish(
        type(candidate)("formal", 7, "abc", str(tmp_path / "v"))
    )
    bench.loop.adapters.unload("candidate")
    assert bench.loop.adapters.current == {"formal": published} and published.label == "formal@7"
    bench.loop.add(request("r", (1, 2), 3, adapter="formal"))
    bench.run()
    assert bench.ended["r"].adapter == "formal@7"


def test_published_files_must_have_the_content_that_was_promised(tmp_path: Path):
    bench = Bench()
    folder = tmp_path / "v"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    version = bench.loop.adapters.load("a", str(folder))
    bench.loop.adapters.unload("a")
    assert bench.loop.adapters.publish(version) == version
    with pytest.raises(InvalidRequest, match="changed"):
        bench.loop.adapters.publish(type(version)("b", 1, "0" * 32, str(folder)))
    assert set(bench.loop.adapters.current) == {"a"}
