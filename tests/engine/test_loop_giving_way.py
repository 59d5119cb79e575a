"""Learning that gives way: a request waits for a layer, not for a pass, and learning still ends."""

from __future__ import annotations

import pytest
from learning_bench import Bench, request, sft_step

from fake_executor import LAYERS, Costs, FakeExecutor
from tandem.build import join_loop
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.events import TokenEvent
from tandem.core.request import Request
from tandem.core.slo import WorkClass
from tandem.core.training import StepOutcome, TrainerSpec
from tandem.engine.channel import QueueChannel
from tandem.engine.host import Host
from tandem.engine.messages import (
    Abort,
    AddRequest,
    Answer,
    Command,
    Message,
    OpenTrainer,
    Stop,
    Tokens,
    Train,
)
from tandem.sim.run import Arrival, Simulation

SLOW = Costs(iteration_s=0.05, token_s=0.005, slice_s=0.01, layer_token_s=0.002)


def test_a_pass_that_gives_way_counts_for_nothing_and_is_done_again():
    undisturbed, disturbed = Bench(), Bench()
    for bench in (undisturbed, disturbed):
        bench.open("t")
        bench.loop.add_step(sft_step("s", "t", [20, 12]))
    asked = 0

    def urgent() -> bool:
        nonlocal asked
        asked += 1
        return asked % 3 == 0

    for _ in range(6):
        disturbed.clock.advance(1e-6)
        disturbed.loop.step(urgent)
    stopped = [plan for plan in disturbed.plans if plan.gives_way and plan.spans]
    assert len(stopped) > 1, "nothing was stopped"
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
    bench.loop.add_step(sft_step("s", "t", [20, 12]))
    bench.loop.step(lambda: urgent)
    bench.cancel("t")
    bench.loop.add_step(sft_step("after", "t", [8]))
    bench.run()
    assert list(bench.outcomes) == ["after"]


def test_plans_with_requests_never_give_way():
    bench = Bench(num_blocks=200, max_batch_tokens=64, recording_tokens=200)
    bench.open("t")
    for number in range(6):
        bench.loop.add_step(sft_step(f"s{number}", "t", [30, 30]))
    bench.loop.add(request("r", (1, 2, 3), 40))
    while "r" not in bench.ended:
        bench.step()
    assert any(plan.gives_way for plan in bench.plans)
    for plan in bench.plans:
        drawn = any(span.draws for span in plan.spans)
        assert not (plan.gives_way and drawn)


@pytest.mark.parametrize("policy", ["adainf", "ekya", "mace", "static", "fcfs", "priority"])
def test_the_baselines_do_not(policy):
    bench = Bench(policy)
    bench.open("t")
    bench.loop.add_step(sft_step("s", "t", [20, 12]))
    bench.clock.advance(100.0)
    bench.run()
    assert bench.plans and not any(plan.gives_way for plan in bench.plans)


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


def served(commands: list[Command]) -> tuple[list[str], Interrupted]:
    """What a host answers, in order, when `commands` come while it learns."""
    said: list[str] = []

    def deliver(message: Message) -> None:
        match message:
            case Tokens(_, events):
                said.extend(each.request_id for each in events if isinstance(each, TokenEvent))
            case Answer(_, _, outcome=StepOutcome() as outcome):
                said.append(outcome.step_id)
                channel.put(Stop())

    clock = VirtualClock()
    executor = Interrupted(64, clock=clock, costs=SLOW)
    executor.channel = channel = QueueChannel(deliver)
    executor.commands = commands
    loop = join_loop(resolve({"scheduling": {"policy": "unified"}}), executor, clock=clock)
    channel.put(OpenTrainer(1, TrainerSpec("t")))
    channel.put(Train(2, sft_step("s", "t", [30, 20])))
    Host(loop, channel, 0).run()
    return said, executor


def test_a_request_that_comes_while_the_host_learns_is_answered_first():
    said, _ = served([AddRequest(request("r", (1, 2, 3), 2)), Abort("nobody")])
    assert said == ["r", "r", "s"]


def test_offline_requests_and_other_commands_wait_for_the_iteration():
    offline = request("r", (1, 2, 3), 2, work_class=WorkClass.OFFLINE)
    said, executor = served([Abort("nobody"), AddRequest(offline)])
    assert sorted(said) == ["r", "r", "s"]
    assert executor.trainers["t"].revision == 1


def simulated(gap_s: float, seconds: float = 30.0):
    """Requests of one token every `gap_s`, with a step to make."""
    clock = VirtualClock()
    executor = FakeExecutor(64, clock=clock, costs=SLOW, recording_tokens=64)
    settings = resolve({"scheduling": {"policy": "unified", "ttft_slo": 1.0}})
    loop = join_loop(settings, executor, clock=clock)
    arrivals = [
        Arrival(place * gap_s, request(f"r{place}", (place % 40, 1), 1))
        for place in range(int(seconds / gap_s))
    ]
    steps = [Arrival(0.0, sft_step(f"s{place}", "t", [30, 20])) for place in range(3)]
    simulation = Simulation(loop, clock, [*arrivals, *steps], [TrainerSpec("t")])
    return simulation.run()


def test_a_request_waits_for_a_layer_and_not_for_a_pass():
    report = simulated(gap_s=0.73)
    layer_s = (
        max(SLOW.iteration_s + 50 * SLOW.token_s, SLOW.slice_s + 100 * LAYERS * 0.002) / LAYERS
    )
    alone_s = SLOW.iteration_s + 2 * SLOW.token_s
    assert len(report.steps) == 3
    assert max(each.ttft_s for each in report.outcomes.values()) < layer_s + alone_s + 0.02


def test_learning_ends_although_a_request_comes_before_any_pass_could():
    """A pass of the smallest piece takes longer than the time between two requests."""
    report = simulated(gap_s=0.12)
    assert len(report.steps) == 3 and all(step.applied for step in report.steps)
    assert all(each.error is None for each in report.outcomes.values())


def test_what_is_urgent_is_an_online_request(monkeypatch):
    """Control: with nothing urgent, requests wait for whole passes."""
    monkeypatch.setattr(Simulation, "_urgent", lambda self: False)
    report = simulated(gap_s=0.73)
    assert max(each.ttft_s for each in report.outcomes.values()) > 0.2
    assert isinstance(Arrival(0.0, request("r", (1,))).work, Request)
