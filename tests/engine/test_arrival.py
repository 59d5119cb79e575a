"""When a request arrived: as whoever accepted it says, whatever the engine was busy with since."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from loop_bench import Bench, request
from prometheus_client import CollectorRegistry

from fake_executor import Costs, FakeExecutor
from tandem.build import join_loop
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.events import TokenEvent
from tandem.core.plan import LanePlan
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.core.slo import Slo
from tandem.engine.channel import QueueChannel
from tandem.engine.client import AsyncEngineClient
from tandem.engine.host import Host
from tandem.engine.messages import AddRequest, Command, Message, Ready, Stop, Tokens
from tandem.sim.run import Arrival, Simulation
from tandem.telemetry.metrics import RequestTiming, ServerMetrics

ITERATION_S = 0.8
SLO = Slo(ttft_s=1.0, tpot_s=10.0)


def one_token(name: str, **more: object) -> Request:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return Request(name, (1, 2, 3), sampling, slo=SLO, **more)  # type: ignore[arg-type]


def met(event: TokenEvent) -> dict[str, float]:
    """By what the metrics count an answer, and the seconds that it was in the queue."""
    metrics, times = ServerMetrics(CollectorRegistry()), event.times
    assert times is not None and event.finish_reason is not None
    RequestTiming(metrics, times.arrival_s, SLO).finished(0, event.finish_reason, 1, times, 0.0)
    samples = [sample for each in metrics.slo.collect() for sample in each.samples]
    found = [each for each in samples if each.name.endswith("_total") and each.value]
    [queued] = [
        sample.value
        for each in metrics.queue.collect()
        for sample in each.samples
        if sample.name.endswith("_sum")
    ]
    return {found[0].labels["met"]: queued}


class SlowHost:
    """A host over an executor whose iterations take `ITERATION_S`, and what it said. While the
    first one runs, a request comes after half of it."""

    def __init__(self, stamp: Callable[[float], float]) -> None:
        self.clock = clock = VirtualClock(1000.0)
        self.ended: dict[str, TokenEvent] = {}
        self.arrival_s = 0.0
        channel = QueueChannel(self._deliver)

        def meanwhile(plan: LanePlan) -> None:
            if not self.arrival_s:
                self.arrival_s = clock.now() + ITERATION_S / 2
                channel.put(AddRequest(one_token("late", arrival_s=stamp(self.arrival_s))))

        executor = FakeExecutor(
            64, clock=clock, costs=Costs(iteration_s=ITERATION_S), on_submit=meanwhile
        )
        self._channel = channel
        loop = join_loop(resolve({"scheduling": {"policy": "fcfs"}}), executor, clock=clock)
        channel.put(AddRequest(one_token("first")))
        Host(loop, channel, 0).run()

    def _deliver(self, message: Message) -> None:
        if isinstance(message, Tokens):
            self.ended |= {event.request_id: event for event in message.events}
            if "late" in self.ended:
                self._channel.put(Stop())


def test_the_wait_for_an_iteration_is_in_the_times_and_makes_an_answer_late():
    host = SlowHost(stamp=lambda arrival_s: arrival_s)
    times = host.ended["late"].times
    assert times is not None and times.arrival_s == host.arrival_s
    assert times.first_token_s - times.arrival_s == pytest.approx(1.5 * ITERATION_S)
    assert met(host.ended["late"]) == {"tpot": pytest.approx(ITERATION_S / 2)}


def test_a_request_that_does_not_say_when_it_came_comes_when_it_is_taken():
    host = SlowHost(stamp=lambda arrival_s: 0.0)
    assert met(host.ended["late"]) == {"both": 0.0}


@given(st.floats(allow_nan=False, allow_infinity=False) | st.floats(600.0, 1100.0))
@example(699.9)  # longer ago than anything waits, so that it was another clock
@example(700.0)
@example(1000.1)
def test_what_a_request_says_is_believed_within_bounds(stamp):
    bench = Bench()
    bench.clock.advance(1000.0)
    bench.loop.add(replace(request("r", [1, 2]), arrival_s=stamp))
    [seq] = bench.scheduler.state.all.values()
    found = seq.request.arrival_s
    assert found == (stamp if 700.0 <= stamp <= 1000.0 else 1000.0)


def test_the_deadline_and_the_order_are_those_of_the_arrival():
    bench = Bench(policy="fcfs", max_sequences=1)
    bench.clock.advance(10.0)
    bench.loop.add(one_token("second", arrival_s=9.5))
    bench.loop.add(one_token("first", arrival_s=9.2))
    waiting = bench.scheduler.state.waiting.in_order
    assert [seq.request.request_id for seq in waiting] == ["first", "second"]
    starts = bench.scheduler.state.starts
    assert starts.late(9.2 + 0.75 + 0.01, 9) == waiting[:1]
    assert starts.late(9.5 + 0.75 + 0.01, 9) == waiting
    bench.run()
    assert list(bench.ended) == [("first", 0), ("second", 0)]


class Sent:
    """A transport that keeps what is sent, to an engine that ends each request at once."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    async def start(self, deliver: Callable[[Message], None]) -> None:
        self._deliver = deliver
        deliver(Ready(0, FakeExecutor(8).info))

    def send(self, command: Command) -> None:
        self.commands.append(command)
        end = TokenEvent("r", 0, (5,), finish_reason=FinishReason.LENGTH)
        self._deliver(Tokens(0, [end]))

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("said_s", "sent_s"), [(0.0, 7.0), (6.5, 6.5)])
async def test_the_client_says_when_a_request_came_unless_that_is_known(said_s, sent_s):
    transport = Sent()
    client = AsyncEngineClient(transport, clock=VirtualClock(7.0))
    await client.start()
    events = [event async for event in client.generate(one_token("r", arrival_s=said_s))]
    assert len(events) == 1
    assert transport.commands == [AddRequest(one_token("r", arrival_s=sent_s))]
    await client.close()


def test_in_a_simulation_requests_arrive_when_they_come_not_when_they_are_taken():
    clock = VirtualClock(50.0)
    executor = FakeExecutor(64, clock=clock, costs=Costs(iteration_s=ITERATION_S))
    loop = join_loop(resolve({"scheduling": {"policy": "fcfs"}}), executor, clock=clock)
    ended: dict[str, TokenEvent] = {}
    step = loop.step

    def stepped(*arguments: object) -> list[TokenEvent]:
        events = step(*arguments)  # type: ignore[arg-type]
        ended.update({event.request_id: event for event in events if event.finish_reason})
        return events

    loop.step = stepped  # type: ignore[method-assign]
    arrivals = [Arrival(at_s, one_token(f"r{at_s}")) for at_s in (0.0, 0.1, 0.7)]
    report = Simulation(loop, clock, arrivals).run()
    for arrival in arrivals:
        times = ended[arrival.work.request_id].times
        outcome = report.outcomes[arrival.work.request_id]
        assert times is not None and times.first_token_s is not None
        assert times.arrival_s == pytest.approx(50.0 + arrival.at_s)
        assert times.first_token_s - times.arrival_s == pytest.approx(outcome.ttft_s)
