"""A plan that follows reads its tokens where the plan before draws them."""

from __future__ import annotations

import pytest
from test_captured import GREEDY, WARM, adapter_of, capture_on, executor_of
from test_captured import SMALL as FEW_LAYERS

from devices import TRITON_DEVICE
from interpreted import interpreted
from tandem.core.plan import DEVICE_LANE, UNDRAWN, Draw, LanePlan, Span, StepResult
from tandem.core.sampling import SamplingParams
from tandem.executor.executor import DeviceExecutor
from tandem.model import sampling as drawing

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
WIDE = SamplingParams(temperature=5.0, top_p=0.95, seed=3)
KINDS = [GREEDY, WARM, GREEDY]
STEPS = 4


@pytest.fixture(params=["layer by layer", "captured"])
def executor(request) -> DeviceExecutor:
    if request.param == "captured" and not isinstance(TRITON_DEVICE, str):
        pytest.skip("needs Triton's interpreter")
    loaded = interpreted(**FEW_LAYERS | {"num_hidden_layers": 1})
    made = executor_of(loaded)
    loaded.lora.add("a", adapter_of(loaded, ("q_proj", "v_proj")))
    if request.param == "captured":
        made.capture_passes(capture_on("cpu"), 0.0)
    return made


def decode(number: int, position: int, token: int, sampling: SamplingParams) -> Span:
    """One token of text `number`, of which the second has an adapter."""
    table = (tuple(range(3 * number, 3 * number + 3)),)
    draws = (Draw(number, 0, position, sampling),)
    return Span(number, position, (token,), table, "a" if number == 1 else None, draws)


def plan(step: int, spans: list[Span]) -> LanePlan:
    return LanePlan(step, DEVICE_LANE, tuple(spans), follows=step > 0)


def one_by_one(executor: DeviceExecutor, kinds: list[SamplingParams]) -> list[StepResult]:
    tokens, results = dict.fromkeys(range(len(kinds)), 5), []
    for step in range(STEPS):
        spans = [decode(n, step, tokens[n], kind) for n, kind in enumerate(kinds)]
        executor.submit(LanePlan(step, DEVICE_LANE, tuple(spans)))
        results += executor.poll()
        tokens = {draw.seq_id: draw.token for draw in results[-1].draws}
    return results


def in_flight(executor: DeviceExecutor, kinds: list[SamplingParams]) -> list[StepResult]:
    """Each plan is submitted before the one before is polled; texts change their order."""
    results: list[StepResult] = []
    for step in range(STEPS):
        spans = [decode(n, step, UNDRAWN if step else 5, kind) for n, kind in enumerate(kinds)]
        executor.submit(plan(step, spans[step:] + spans[:step]))
        if step:
            results += executor.poll()
            assert len(results) == step, "the plan that follows is not waited for"
    return results + executor.poll()


def test_tokens_are_those_of_plans_one_by_one(executor):
    expected = one_by_one(executor, KINDS)
    found = in_flight(executor, KINDS)
    assert [result.step for result in found] == list(range(STEPS))
    for ours, theirs in zip(found, expected, strict=True):
        by_text = sorted(ours.draws, key=lambda draw: draw.seq_id)
        assert by_text == list(theirs.draws) and not ours.failed


def test_texts_that_ended_are_left_out(executor):
    expected = one_by_one(executor, KINDS)
    executor.submit(plan(0, [decode(n, 0, 5, kind) for n, kind in enumerate(KINDS)]))
    executor.submit(plan(1, [decode(2, 1, UNDRAWN, KINDS[2]), decode(1, 1, UNDRAWN, KINDS[1])]))
    first, second = executor.poll() + executor.poll()
    assert first.draws == expected[0].draws
    assert second.draws == (expected[1].draws[2], expected[1].draws[1])


def test_a_token_that_is_drawn_among_more_is_another_one_on_the_device(executor, monkeypatch):
    """The text is computed again from there; others go on."""
    monkeypatch.setattr(drawing, "_TOP_P_CANDIDATES", 2)
    expected = one_by_one(executor, [WIDE, GREEDY])
    assert [draw.redrawn for draw in expected[0].draws] == [True, False]
    found = in_flight(executor, [WIDE, GREEDY])
    assert found[0].draws == expected[0].draws
    assert [token_of(1, result) for result in found] == [token_of(1, each) for each in expected]


def token_of(number: int, result: StepResult) -> int:
    return next(draw.token for draw in result.draws if draw.seq_id == number)


def test_what_the_plan_before_has_not_drawn_fails_alone(executor):
    executor.submit(plan(0, [decode(0, 0, 5, GREEDY)]))
    executor.submit(plan(1, [decode(n, 1, UNDRAWN, GREEDY) for n in range(2)]))
    (first,), (second,) = executor.poll(), executor.poll()
    assert [draw.seq_id for draw in second.draws] == [0] and not first.failed
    assert second.failed == ((1, "the plan before has not drawn its token"),)


def test_nothing_follows_a_plan_that_was_computed_in_parts(executor, monkeypatch):
    run = executor._run

    def broken(spans, *rest):
        if len(spans) > 1:
            raise RuntimeError("the pass failed")
        return run(spans, *rest)

    monkeypatch.setattr(executor, "_run", broken)
    executor.submit(plan(0, [decode(n, 0, 5, GREEDY) for n in range(2)]))
    with pytest.raises(RuntimeError, match="in parts"):
        executor.submit(plan(1, [decode(0, 1, UNDRAWN, GREEDY)]))
    (result,) = executor.poll()
    assert [draw.seq_id for draw in result.draws] == [0, 1]


def test_a_token_that_is_not_known_fails_in_a_plan_that_does_not_follow(executor):
    executor.submit(LanePlan(0, DEVICE_LANE, (decode(0, 0, UNDRAWN, GREEDY),)))
    (result,) = executor.poll()
    assert "outside of the vocabulary" in dict(result.failed)[0]
