"""A device that goes on with slices while the tokens before them are delivered."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from learning_bench import SMALL, Bench, request, sft_step

from fake_executor import FakeExecutor
from tandem.core.plan import BackwardSlice, LanePlan, SliceResult
from tandem.core.ports import Urgent, never
from tandem.core.slo import Slo
from tandem.estimators.latency import LatencyModel

TPOT_S = 0.1
HOST_S = 0.015  # between two iterations; learning alone would have to take eight times that
KNOWN = 20  # iterations after which that is known
STEPS = 6
MOST_S = 0.1  # of the slices of one iteration


class Trailing(FakeExecutor):
    """Computes in order, but tells what a pass has drawn before the slices behind it are done."""

    free_s = 0.0
    trailing: tuple[SliceResult, ...] = ()
    defers = False
    trailed = 0

    def submit(self, plan: LanePlan, urgent: Urgent = never) -> int:
        """See `FakeExecutor`."""
        clock = self._clock
        assert clock is not None
        clock.advance(max(0.0, self.free_s - clock.now()))
        draws = any(span.draws for span in plan.spans)
        trails = bool(plan.slices) and not plan.updates and (plan.preemptible or draws)
        before, self.trailing, self.defers = self.trailing, (), trails and draws
        super().submit(plan, urgent)
        plan, result = self._results.pop()
        if trails:
            self.trailed += draws
            self.trailing = result.slices
            behind_s = sum(each.elapsed_s for each in result.slices) if draws else 0.0
            self.free_s = clock.now() + behind_s
            unknown = tuple([replace(each, elapsed_s=math.nan) for each in result.slices])
            result = replace(result, elapsed_s=result.forward_s, slices=unknown)
        self._results.append((plan, replace(result, timed=before)))
        return plan.step

    def _slice(self, piece: BackwardSlice, begun: bool = False) -> SliceResult:
        clock, self._clock = self._clock, None if self.defers else self._clock
        try:
            return super()._slice(piece, begun)
        finally:
            self._clock = clock


def taught(executor: type[FakeExecutor]) -> Bench:
    """Requests whose answers meet their objective, and steps beside them."""
    bench = Bench("unified", {"ceiling_s": f"{7 * HOST_S}"}, executor=executor)
    bench.open("t")
    for place in range(4):
        prompt = (place + 1,) * 6
        bench.loop.add(request(f"{place}", prompt, max_tokens=56, slo=Slo(1.0, TPOT_S)))
    while len(bench.ended) < 4 or len(bench.outcomes) < STEPS:
        bench.clock.advance(HOST_S)
        bench.step()
        if len(bench.plans) == KNOWN:
            for place in range(STEPS):
                bench.loop.teaching.add_step(sft_step(f"step-{place}", "t", [9, 9]))
    return bench


def test_answers_and_steps_are_those_of_a_device_that_is_waited_for() -> None:
    bench, usual = taught(Trailing), taught(FakeExecutor)
    assert bench.executor.trailed > 3, "no slice trailed"
    assert bench.tokens == usual.tokens and len(bench.tokens["0"]) == 56
    for name, outcome in bench.outcomes.items():
        assert outcome.applied and outcome.loss == usual.outcomes[name].loss
    assert bench.executor.trainers["t"].weights == usual.executor.trainers["t"].weights


def test_the_next_decision_counts_with_slices_that_are_still_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LatencyModel, "guessed", False)
    bench = taught(Trailing)
    assert bench.executor.trailed > 3
    for times in bench.times.values():
        assert (times[-1] - times[0]) / (len(times) - 1) <= TPOT_S


def trailing() -> Bench:
    """A device that computes slices behind a decode."""
    bench = Bench("fcfs", executor=Trailing)
    bench.open("t")
    bench.loop.add(request("first", (1,) * 6, max_tokens=50))
    bench.loop.teaching.add_step(sft_step("step", "t", [9, 9]))
    while not bench.executor.trailed:
        bench.step()
    return bench


def test_nothing_waits_for_a_time_that_is_a_guess() -> None:
    """The first guesses are for a small machine: a device would idle for seconds."""
    bench = trailing()
    assert bench.scheduler.latency.guessed and bench.loop.has_work


def test_a_request_that_comes_while_slices_trail_is_in_the_next_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LatencyModel, "guessed", False)
    bench = trailing()
    assert not bench.loop.has_work and 0.0 < bench.loop.pause_s < MOST_S
    bench.loop.add(request("second", (2,) * 6))
    assert not bench.loop.has_work, "the device is busy"
    before = len(bench.plans)
    bench.step()
    assert len(bench.plans) == before + 1 and len(bench.plans[-1].spans) == 2


def test_times_that_come_late_are_learned_from_and_accounted_for() -> None:
    bench = taught(Trailing)
    pieces = [piece for plan in bench.plans for piece in plan.slices]
    assert bench.scheduler.latency.backward.errors.samples >= len(pieces) - 3
    rows, updates = 2 * 8, STEPS
    spent_s = len(pieces) * SMALL.slice_s + updates * SMALL.update_s
    spent_s += rows * SMALL.layer_token_s * sum(piece.hi - piece.lo for piece in pieces)
    assert bench.loop.stats().work_s["backward"] == pytest.approx(spent_s)
