"""Learning that gives way: a request waits for a layer, not for a pass, and learning still ends."""

from __future__ import annotations

import pytest
from learning_bench import Bench, request, sft_step

from fake_executor import LAYERS, Costs, FakeExecutor
from tandem.build import join_loop
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.events import TokenEvent
from tandem.core.plan import StepResult
from tandem.core.slo import WorkClass
from tandem.core.training import StepOutcome, TrainerSpec
from tandem.engine.channel import QueueChannel
from tandem.engine.host import Host
from tandem.engine.messages import (
    Abort,
    AddRequest,
    CallResult,
    Command,
    Message,
    OpenTrainer,
    Stop,
    Tokens,
    Train,
)
from tandem.sim.run import Arrival, Simulation

SLOW = Costs(iteration_s=0.05, token_s=0.005, slice_s=0.01, layer_token_s=0.002)


def results_of(loop) -> list[StepResult]:
    """What is done from now on."""
    found: list[StepResult] = []
    loop.on_plan = lambda plan, result: found.append(result)
    return found


def test_a_pass_that_gives_way_counts_for_nothing_and_is_done_again():
    undisturbed, disturbed = Bench(), Bench()
    results = results_of(disturbed.loop)
    for bench in (undisturbed, disturbed):
        bench.open("t")
        bench.loop.teaching.add_step(sft_step("s", "t", [20, 12]))
    asked = 0

    def urgent() -> bool:
        nonlocal asked
        asked += 1
        return asked % 3 == 0

    for _ in range(6):
        disturbed.clock.advance(1e-6)
        disturbed.loop.step(urgent)
    assert sum(result.stopped for result in results) > 1
    assert disturbed.loop.stats().iteration_tokens_sum == sum(
        plan.num_tokens
        for plan, result in zip(disturbed.plans, results, strict=True)
        if not result.stopped
    )
    for bench in (undisturbed, disturbed):
        bench.collect()
        bench.run()
        assert bench.outcomes["s"].applied
    found = [bench.executor.trainers["t"].weights for bench in (undisturbed, disturbed)]
    assert found[0] == found[1]


@pytest.mark.parametrize("urgent", [True, False])
def test_a_step_that_was_cancelled_after_its_pass_gave_way_leaves_nothing(urgent):
    bench = Bench()
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("s", "t", [20, 12]))
    bench.loop.step(lambda: urgent)
    bench.cancel("t")
    bench.loop.teaching.add_step(sft_step("after", "t", [8]))
    bench.run()
    assert list(bench.outcomes) == ["after"]


def test_plans_with_requests_never_give_way():
    bench = Bench(num_blocks=200, max_batch_tokens=64, recording_tokens=200)
    bench.open("t")
    for number in range(6):
        bench.loop.teaching.add_step(sft_step(f"s{number}", "t", [30, 30]))
    bench.loop.add(request("r", (1, 2, 3), 40))
    while "r" not in bench.ended:
        bench.step()
    giving = [plan for plan in bench.plans if plan.preemptible]
    assert giving and all(span.score_targets for plan in giving for span in plan.spans)


@pytest.mark.parametrize("ends", ["served", "aborted"])
def test_a_lost_pass_that_holds_every_slot_holds_nobody_up(ends):
    """Six sequences of an old step for four slots; what comes needs one of them, or is gone."""
    bench = Bench(max_sequences=4, num_blocks=64)
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("s", "t", [9] * 6))
    bench.clock.advance(100.0)
    results = results_of(bench.loop)
    bench.loop.step(lambda: True)
    assert results[-1].stopped and len(bench.plans[-1].spans) > 1
    bench.loop.add(request("r", (1, 2, 3), 3))
    if ends == "aborted":
        bench.loop.abort("r")
    bench.run(limit=400)
    assert bench.outcomes["s"].applied and ("r" in bench.ended) == (ends == "served")


def test_a_lost_pass_as_long_as_the_cache_is_done_again():
    bench = Bench(num_blocks=15, max_batch_tokens=64)
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("s", "t", [58]))
    bench.loop.step(lambda: True)
    bench.run(limit=100)
    assert bench.outcomes["s"].applied


def test_learning_gives_way_in_an_idle_engine_however_much_it_has_earned():
    bench = Bench(options={"min_share": "1.0"}, max_batch_tokens=64, costs=SLOW)
    bench.open("t")
    for number in range(4):
        bench.loop.teaching.add_step(sft_step(f"s{number}", "t", [30, 20]))
    bench.run()
    assert len(bench.outcomes) == 4 and all(plan.preemptible for plan in bench.plans)


@pytest.mark.parametrize("policy", ["adainf", "ekya", "mace", "static", "fcfs", "priority"])
def test_the_baselines_do_not(policy):
    bench = Bench(policy)
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("s", "t", [20, 12]))
    bench.clock.advance(100.0)
    bench.run()
    assert bench.plans and not any(plan.preemptible for plan in bench.plans)


class Interrupted(FakeExecutor):
    """While the first plan that gives way runs, `commands` come in over `channel`."""

    channel: QueueChannel
    commands: list[Command]

    def _spend(self, seconds: float) -> float:
        if self.recordings and self.commands:
            for command in self.commands:
                self.channel.put(command)
            self.commands = []
        return super()._spend(seconds)


def served(commands: list[Command]) -> tuple[list[str], list[StepResult]]:
    """What a host answers, in order, when `commands` come while it learns; and what was done."""
    said: list[str] = []

    def deliver(message: Message) -> None:
        match message:
            case Tokens(_, events):
                said.extend(each.request_id for each in events if isinstance(each, TokenEvent))
            case CallResult(_, _, result=StepOutcome() as outcome):
                said.append(outcome.step_id)
                channel.put(Stop())

    clock = VirtualClock()
    executor = Interrupted(64, clock=clock, costs=SLOW)
    executor.channel = channel = QueueChannel(deliver)
    executor.commands = commands
    loop = join_loop(resolve({"scheduling": {"policy": "unified"}}), executor, clock=clock)
    channel.put(OpenTrainer(1, TrainerSpec("t")))
    channel.put(Train(2, sft_step("s", "t", [30, 20])))
    results = results_of(loop)
    Host(loop, channel, 0).run()
    assert executor.trainers["t"].revision == 1
    return said, results


def test_a_request_that_comes_while_the_host_learns_is_answered_first():
    said, results = served([AddRequest(request("r", (1, 2, 3), 2)), Abort("nobody")])
    assert said == ["r", "r", "s"]
    assert [result.stopped for result in results].count(True) == 1


def test_commands_that_were_read_ahead_keep_their_order():
    said, _ = served([AddRequest(request("r", (1, 2, 3), 2)), Abort("r")])
    assert said == ["s"]


def test_a_channel_that_fails_ends_the_host_and_no_step():
    class Failing(QueueChannel):
        def receive(self, timeout_s: float) -> list[Command]:
            if executor.recordings:
                raise OSError("the pipe is gone")
            return super().receive(timeout_s)

    clock, said = VirtualClock(), []
    executor = FakeExecutor(64, clock=clock, costs=SLOW)
    channel = Failing(said.append)
    loop = join_loop(resolve({"scheduling": {"policy": "unified"}}), executor, clock=clock)
    channel.put(OpenTrainer(1, TrainerSpec("t")))
    channel.put(Train(2, sft_step("s", "t", [30, 20])))
    with pytest.raises(OSError, match="the pipe is gone"):
        Host(loop, channel, 0).run()
    assert not any(
        isinstance(each, CallResult) and isinstance(each.result, StepOutcome) for each in said
    )


def test_offline_requests_and_other_commands_wait_for_the_iteration():
    offline = request("r", (1, 2, 3), 2, work_class=WorkClass.OFFLINE)
    said, results = served([Abort("nobody"), AddRequest(offline)])
    assert set(said) == {"r", "s"}
    assert not any(result.stopped for result in results)


def simulated(gap_s: float, seconds: float = 30.0, steps_at_s: float = 0.0):
    """Requests of one token every `gap_s`, with three steps to make; and how many passes were
    lost."""
    clock = VirtualClock()
    executor = FakeExecutor(64, clock=clock, costs=SLOW, recording_tokens=64)
    settings = resolve({"scheduling": {"policy": "unified", "ttft_slo": 1.0}})
    loop = join_loop(settings, executor, clock=clock)
    arrivals = [
        Arrival(place * gap_s, request(f"r{place}", (place % 40, 1), 1))
        for place in range(int(seconds / gap_s))
    ]
    steps = [Arrival(steps_at_s, sft_step(f"s{place}", "t", [30, 20])) for place in range(3)]
    results = results_of(loop)
    simulation = Simulation(loop, clock, [*arrivals, *steps], [TrainerSpec("t")])
    return simulation.run(), sum(result.stopped for result in results)


def test_a_request_waits_for_a_layer_and_not_for_a_pass():
    report, _ = simulated(gap_s=0.73)
    layer_s = (
        max(SLOW.iteration_s + 50 * SLOW.token_s, SLOW.slice_s + 100 * LAYERS * 0.002) / LAYERS
    )
    alone_s = SLOW.iteration_s + 2 * SLOW.token_s
    assert len(report.steps) == 3
    assert max(each.ttft_s for each in report.outcomes.values()) < layer_s + alone_s + 0.02


def test_learning_ends_although_a_request_comes_before_any_pass_could():
    """A pass of the smallest piece takes longer than the time between two requests."""
    report, lost = simulated(gap_s=0.12)
    assert lost > 0
    assert len(report.steps) == 3 and all(step.applied for step in report.steps)
    assert all(each.error is None for each in report.outcomes.values())


def test_control_without_anything_urgent_requests_wait_for_whole_passes(monkeypatch):
    monkeypatch.setattr(Simulation, "_urgent", lambda self: False)
    report, lost = simulated(gap_s=0.73)
    assert lost == 0 and max(each.ttft_s for each in report.outcomes.values()) > 0.2


def test_a_step_that_comes_before_a_request_does_not_hide_it():
    """Both come while a pass runs."""
    clock = VirtualClock()
    executor = FakeExecutor(64, clock=clock, costs=SLOW, recording_tokens=64)
    loop = join_loop(resolve({"scheduling": {"policy": "unified"}}), executor, clock=clock)
    results = results_of(loop)
    arrivals = [
        Arrival(0.0, sft_step("first", "t", [30, 20])),
        Arrival(0.01, sft_step("second", "t", [30, 20])),
        Arrival(0.02, request("r", (1, 2), 1)),
    ]
    report = Simulation(loop, clock, arrivals, [TrainerSpec("t")]).run()
    assert results[0].stopped and len(report.steps) == 2
    assert report.outcomes["r"].ttft_s < 0.2
