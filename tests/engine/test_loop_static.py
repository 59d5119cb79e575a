"""Fixed shares over the fake device: both sides go on in any memory, and idle is no credit."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from learning_bench import Bench, check_answer, request, sft_step


@pytest.mark.parametrize("older", ["request", "step"])
def test_a_request_starts_although_paused_training_has_its_place(older):
    """13 blocks: the step's sequence takes 10, the prompt 9. Who came first has the memory first,
    and loses nothing of what it has computed."""
    bench = Bench("static", num_blocks=13, max_batch_tokens=8)
    bench.open("t")
    asked = request("r", tuple(range(34)), 4)
    commands = {
        "request": lambda: bench.loop.add(asked),
        "step": lambda: bench.loop.teaching.add_step(sft_step("s", "t", [40])),
    }
    commands.pop(older)()
    bench.clock.advance(1.0)
    (younger,) = commands.values()
    if older == "step":
        bench.step()
        bench.step()
    else:
        bench.step()
    younger()
    bench.run()
    check_answer(bench, asked)
    assert bench.outcomes["s"].applied
    rows = {"request": 34 + 3, "step": 39}
    spans = [span for plan in bench.plans for span in plan.spans]
    recording = [span for span in spans if span.adapter is not None]
    serving = [span for span in spans if span.adapter is None]
    computed = {
        "request": sum(len(span.tokens) for span in serving),
        "step": sum(len(span.tokens) for span in recording),
    }
    assert computed[older] == rows[older], "the older one was preempted"


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 12), st.booleans()), min_size=1, max_size=6
    ),
    st.lists(st.integers(20, 50), min_size=1, max_size=4),
    st.integers(4, 20),
    st.integers(0, 3),
)
@example([(1, 1, True)], [20], 19, 3)  # the step has ended when the request comes
def test_nobody_takes_blocks_back_and_forth(prompts, lengths, rows, steps_before):
    """Each sequence alone nearly fills the cache; work that is thrown away is bounded."""
    bench = Bench("static", num_blocks=13, max_batch_tokens=rows, prefix_caching=False)
    bench.open("t")
    needed = 0
    for place, length in enumerate(lengths):
        bench.loop.teaching.add_step(sft_step(f"s{place}", "t", [length]))
        needed += length - 1
    for _ in range(steps_before):
        bench.step()
    for place, (prompt, tokens, waits) in enumerate(prompts):
        # Once all has ended, nothing happens before the next one comes.
        if waits and (len(bench.outcomes) < len(lengths) or len(bench.ended) < place):
            bench.step()
        bench.loop.add(request(f"r{place}", (place,) * prompt, tokens))
        needed += prompt + tokens - 1
    bench.run(1500)
    assert len(bench.outcomes) == len(lengths) and len(bench.ended) == len(prompts)
    computed = sum(len(span.tokens) for plan in bench.plans for span in plan.spans)
    assert computed <= 4 * needed


def test_an_idle_hour_is_no_credit():
    """The last request has ended long ago; a new one does not wait until training has caught up."""
    bench = Bench("static", num_blocks=200, max_batch_tokens=64, recording_tokens=200)
    bench.open("t")
    bench.loop.add(request("first", (1, 2), 20))
    bench.run()
    bench.clock.advance(8.0)
    for number in range(40):
        bench.loop.teaching.add_step(sft_step(f"s{number}", "t", [30, 30]))
    came_s = bench.clock.now()
    bench.loop.add(request("second", (1, 2), 40))
    while "second" not in bench.ended:
        bench.step()
    assert bench.times["second"][0] - came_s < 1.0
    assert bench.outcomes, "training has had nothing"
