"""The simulated device keeps what the profiled one does, and slices are predicted by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rates import slice_rates
from tandem.build import join_loop
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.plan import (
    DEVICE_LANE,
    BackwardSlice,
    KeptLayers,
    LanePlan,
    OpenMicroBatch,
    RecordTarget,
    Span,
    StepResult,
    Update,
)
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.training import (
    LossKind,
    LossSpec,
    Role,
    StepOutcome,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.estimators.datasheet import datasheet_profile
from tandem.sim.curves import Saturating
from tandem.sim.executor import SimExecutor

ALONE, BESIDE = (0.75, 0.0), (0.0, 1.0)
SHEET = datasheet_profile("l4", "qwen2.5-0.5b")
RATES = replace(
    SHEET.rates,
    slices=slice_rates(
        slice=1e-3,
        layer=1e-4,
        layer_row=1e-6,
        again=1e-4,
        again_row=1e-6,
        rest_row=4e-7,
        first=2e-3,
        first_row=1e-6,
    ),
)
PROFILE = replace(SHEET, rates=RATES, kept_alone=ALONE, kept_beside=BESIDE)


def sft_step(number: int) -> TrainingStep:
    tokens = tuple((7 * place + number) % 1000 for place in range(64))
    group = tuple(TrainingSequence(tokens, 1, Role.TARGET) for _ in range(2))
    return TrainingStep(f"step-{number}", "learner", LossSpec(LossKind.SFT), (group,))


@pytest.mark.parametrize("profile", [SHEET, PROFILE])
def test_slices_are_predicted_by_what_their_passes_kept(profile):
    """Without noise and told all rates no prediction is wrong, whatever a pass recorded beside."""
    clock, kept = VirtualClock(), set()

    def on_plan(plan: LanePlan, result: StepResult) -> None:
        kept.update((each.whole, each.inner) for each in result.kept)

    executor = SimExecutor(profile, clock, curve=Saturating(), noise=False, on_plan=on_plan)
    loop = join_loop(resolve({}), executor, clock=clock, rates=profile.rates)
    loop.teaching.open_trainer(TrainerSpec("learner"))
    for number in range(6):
        loop.teaching.add_step(sft_step(number))
    while loop.has_work:
        if len(loop.scheduler.learning.queued) == 3 and not loop.scheduler.state.all:
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            loop.add(Request("request", (1, 2, 3), params))
        loop.step()
    assert kept == {profile.kept_alone, profile.kept_beside}
    assert loop.scheduler.latency.backward.errors.samples > 5
    assert loop.scheduler.latency.backward.errors.p95 < 1e-6


def test_on_half_of_the_device_all_takes_twice_as_long():
    def took(share: float) -> tuple[float, float, float]:
        clock = VirtualClock()
        executor = SimExecutor(PROFILE, clock, curve=Saturating(), noise=False)
        executor.open_trainer(TrainerSpec("learner"))
        spans = (Span(1, 0, (1,) * 10, ((1,),), record=RecordTarget(1, 0)),)
        opens = (OpenMicroBatch(1, "learner", 0, (10,)),)
        backward = BackwardSlice(1, PROFILE.info.num_layers, 0, (1.0,))
        for plan in (
            LanePlan(0, DEVICE_LANE, spans, opens=opens, share=share),
            LanePlan(1, DEVICE_LANE, (), slices=(backward,), share=share),
            LanePlan(2, DEVICE_LANE, (), updates=(Update("learner", 1),), share=share),
        ):
            executor.submit(plan)
        passes, slices, updates = executor.poll()
        assert clock.now() == pytest.approx(sum(e.elapsed_s for e in (passes, slices, updates)))
        return passes.elapsed_s, slices.slices[0].elapsed_s, updates.updates[0].elapsed_s

    assert took(0.5) == pytest.approx([2.0 * seconds for seconds in took(1.0)])


def test_a_pass_is_alone_if_all_its_micro_batches_are_whole():
    executor = SimExecutor(PROFILE, VirtualClock(), curve=Saturating())
    executor.open_trainer(TrainerSpec("learner"))

    def kept(opens: tuple[int, ...], *spans: tuple[int, int, int]) -> tuple[KeptLayers, ...]:
        """Of `opens`, ten rows each, and spans (micro-batch, start, rows)."""
        plan = LanePlan(
            0,
            DEVICE_LANE,
            tuple(
                Span(number, start, (1,) * rows, ((number,),), record=RecordTarget(number, 0))
                for number, start, rows in spans
            ),
            opens=tuple(OpenMicroBatch(number, "learner", 0, (10,)) for number in opens),
        )
        executor.submit(plan)
        return executor.poll()[0].kept

    assert kept((1, 2), (1, 0, 10), (2, 0, 10)) == (KeptLayers(1, *ALONE), KeptLayers(2, *ALONE))
    assert kept((3, 4), (3, 0, 10), (4, 0, 6)) == (KeptLayers(3, *BESIDE), KeptLayers(4, *BESIDE))
    assert kept((), (4, 6, 4)) == (KeptLayers(4, *BESIDE),)


@pytest.mark.parametrize("lengths", [(9, 9), (20, 7, 30, 31)])
def test_pairs_that_are_recorded_apart_have_the_same_losses(monkeypatch, lengths):
    found = []
    for rows in (1000, 27, 1):
        monkeypatch.setattr("tandem.scheduling.learning.recording_rows", lambda *_, r=rows: r)
        clock = VirtualClock()
        executor = SimExecutor(PROFILE, clock, curve=Saturating())
        loop = join_loop(resolve({}), executor, clock=clock, rates=PROFILE.rates)
        loop.teaching.open_trainer(TrainerSpec("learner"))
        roles = (Role.CHOSEN, Role.REJECTED) * (len(lengths) // 2)
        group = tuple(
            TrainingSequence((1,) * length, 1, role)
            for length, role in zip(lengths, roles, strict=True)
        )
        for number in range(40):
            step = TrainingStep(f"s{number}", "learner", LossSpec(LossKind.DPO), (group, group))
            loop.teaching.add_step(step)
        losses: list[float] = []
        while loop.has_work:
            loop.step()
            losses += [
                each.loss for each in loop.teaching.take_learned() if isinstance(each, StepOutcome)
            ]
        assert len(losses) == 40 and losses[-1] < losses[0]
        found.append(losses)
    assert found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])
