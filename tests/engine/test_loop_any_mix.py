"""Random mixes of requests, steps, scores, failures and cancels: all end, no rule is broken."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from learning_bench import (
    POLICIES,
    SLOW,
    SMALL,
    Bench,
    bench_of,
    check_answer,
    dpo_step,
    kto_step,
    request,
    sft_step,
)

from fake_answers import expected_score
from tandem.core.errors import InvalidRequest
from tandem.core.training import ScoreRequest

lengths = st.lists(st.integers(3, 30), min_size=1, max_size=3)
prompts = st.lists(st.integers(0, 3), min_size=1, max_size=30).map(tuple)
actions = st.one_of(
    st.tuples(st.just("add"), prompts, st.integers(1, 20)),
    st.tuples(st.just("abort"), st.integers(0, 8)),
    st.tuples(st.just("sft"), st.sampled_from("ABC"), lengths, lengths),
    st.tuples(st.just("dpo"), st.sampled_from("ABC"), st.lists(st.integers(3, 16), min_size=1,
                                                              max_size=2)),
    st.tuples(st.just("kto"), st.sampled_from("ABC"), st.lists(st.integers(3, 16), min_size=1,
                                                              max_size=2)),
    st.tuples(st.just("score"), st.sampled_from("ABC-"), prompts.filter(lambda p: len(p) > 1)),
    st.tuples(st.just("cancel"), st.sampled_from("ABC")),
    st.tuples(st.just("reopen"), st.sampled_from("ABC")),
    st.tuples(st.just("fail"), st.sampled_from(["sequence", "nan", "slice", "update"]),
              st.integers(0, 12)),
    st.tuples(st.just("step"), st.integers(1, 6)),
)  # fmt: skip


def play(script, bench: Bench, *, trains: bool = True) -> dict[str, tuple]:  # noqa: C901, PLR0915
    """Run a script to its end; what was asked, by id. Who never trains is left by its steps."""
    asked: dict[str, tuple] = {}
    for name in "ABC":
        bench.open(name, seed=ord(name))
    for number, action in enumerate(script):
        kind, name = action[0], f"{action[0]}{number}"
        if kind == "add":
            asked[name] = (request(name, action[1], action[2]),)
            bench.loop.add(asked[name][0])
        elif kind == "abort":
            for chosen in list(asked)[action[1] : action[1] + 1]:
                bench.loop.abort(chosen)
                if chosen.startswith(("add", "score")):
                    asked.pop(chosen)
        elif kind in ("sft", "dpo", "kto"):
            make = {"sft": sft_step, "dpo": dpo_step, "kto": kto_step}[kind]
            step = make(name, *action[1:])
            try:
                bench.loop.teaching.add_step(step)
            except InvalidRequest as error:
                assert "rows" in str(error)
                continue
            asked[name] = (step,)
        elif kind == "score":
            trainer = None if action[1] == "-" else action[1]
            score = ScoreRequest(name, action[2], 1, trainer=trainer)
            bench.loop.teaching.add_score(score)
            asked[name] = (score,)
        elif kind == "cancel":
            bench.cancel(action[1])
        elif kind == "reopen":
            bench.cancelled |= set(bench.loop.teaching.close_trainer(action[1]))
            bench.collect()
            bench.open(action[1], seed=number)
        elif kind == "fail":
            victims = {
                "sequence": bench.executor.failing,
                "nan": bench.executor.nan_scores,
                "slice": bench.executor.failing_slices,
            }
            if action[1] == "update":
                bench.executor.failing_updates = {"ABC"[action[2] % 3]}
            else:
                victims[action[1]].add(action[2])
        else:
            for _ in range(action[1]):
                if bench.loop.pause_s < 1e9:
                    bench.step()
        bench.cache.check()
    bench.run()
    if trains:
        return asked
    assert not any(plan.slices or plan.updates or plan.opens for plan in bench.plans)
    for name in "ABC":
        bench.cancel(name)
    bench.run()
    return asked


@settings(max_examples=250)
@given(
    script=st.lists(actions, min_size=1, max_size=20),
    policy=st.sampled_from([*POLICIES, "no_retrain"]),
    num_blocks=st.sampled_from([13, 14, 16, 20, 28, 40]),
    max_sequences=st.integers(1, 6),
    max_batch_tokens=st.integers(6, 60),
    recording_tokens=st.integers(20, 100),
    prefix_caching=st.booleans(),
    together=st.sampled_from([1, 12, 1000]),
    costs=st.sampled_from([SMALL, SLOW]),
)
# A step without a sequence slot once held up the half-done score that had the only one.
@example(
    script=[("add", (0,), 1), ("dpo", "B", [3]), ("dpo", "A", [3, 8]), ("score", "A", (0,) * 8)],
    policy="unified",
    num_blocks=13,
    max_sequences=1,
    max_batch_tokens=6,
    recording_tokens=20,
    prefix_caching=False,
    together=1000,
    costs=SMALL,
)
# An update that a half-done score holds up was once planned again and again, alone.
@example(
    script=[("add", (0,), 1)] * 5
    + [("abort", 0)]
    + [("add", (0,), 1)] * 3
    + [("add", (1,), 1), ("add", (1, 0, 0), 19), ("kto", "A", [16]), ("score", "A", (0,) * 9)]
    + [("abort", 0), ("add", (0,), 1)] * 2
    + [("add", (0,), 4)],
    policy="unified",
    num_blocks=13,
    max_sequences=5,
    max_batch_tokens=6,
    recording_tokens=20,
    prefix_caching=False,
    together=1000,
    costs=SMALL,
)
def test_any_mix_ends_and_breaks_no_rule(script, policy, together, **sizes):
    """`together` rows of a micro-batch are recorded together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.scheduling.learning.recording_rows", lambda *_: together)
        check_mix(script, policy, sizes)


def check_mix(script, policy, sizes) -> None:
    bench = bench_of(policy, **sizes)
    trains = policy in POLICIES
    asked = play(script, bench, trains=trains)
    for name, (what,) in asked.items():
        if name.startswith("add"):
            if bench.ended[name].error is None:
                check_answer(bench, what)
        elif name.startswith("score"):
            assert (name in bench.scores) != (name in bench.failures)
            if what.trainer is None and name in bench.scores:
                wanted = expected_score(what.tokens, 1, None)
                found = bench.scores[name].logprob
                assert math.isnan(found) or found == pytest.approx(wanted, rel=1e-12)
        else:
            assert (name in bench.outcomes) != (name in bench.cancelled)
            if name in bench.outcomes and not bench.outcomes[name].applied:
                assert bench.outcomes[name].problem
    nans = sum(math.isnan(score.logprob) for score in bench.scores.values())
    assert nans <= len(bench.executor.nan_scores)
    other = bench_of(policy, **sizes)
    play(script, other, trains=trains)
    assert other.plan_text == bench.plan_text, "equal input, different plans"
