"""Makes requests arrive and time pass over an engine loop.

With a virtual clock this is a discrete-event simulation. Its only events are arrivals and ends of
iterations; the clock jumps in between. With a sleeping clock it puts the same load on a real
engine. Invariant: the same simulated loop, arrivals and seed give the same outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tandem.core.batches import POOL_TOKENS
from tandem.core.clock import WaitingClock
from tandem.core.errors import InvalidRequest, PolicyFault
from tandem.core.events import TokenEvent
from tandem.core.request import Request
from tandem.core.sequence import FinishReason
from tandem.core.slo import Slo, WorkClass
from tandem.core.training import StepOutcome, TrainerSpec, TrainingStep
from tandem.engine.loop import EngineLoop
from tandem.sim.executor import SimExecutor
from tandem.sim.leap import Leaper

# Steps of a supply to keep queued: one that runs and the next one.
_STEPS_AHEAD = 2
# Offline requests of a stream that are in the engine, as the server keeps its batches' lines there;
# fewer once their prompts have `POOL_TOKENS`.
_OFFLINE_AHEAD = 256
# A policy that runs nothing for this long while requests wait is taken to run nothing ever.
_STALL_S = 10.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request or a training step that arrives `at_s` seconds after the beginning."""

    at_s: float
    work: Request | TrainingStep


@dataclass(slots=True)
class SimOutcome:
    """What happened to one request. Times are seconds since the beginning.

    A request that was cut off by the end of the run is not `finished` and has no `error`.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    slo: Slo | None = None  # the objective that it brought
    work_class: WorkClass = WorkClass.ONLINE
    first_s: float = math.nan
    last_s: float = math.nan
    output_tokens: int = 0
    cached_tokens: int = 0
    finished: bool = False  # ended well
    error: str | None = None  # why it did not end well; `refused`: it could never run

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The engine at one moment: running and waiting sequences, and KV blocks in use."""

    at_s: float
    running: int
    waiting: int
    kv_blocks: int


@dataclass(slots=True)
class SimReport:
    """Results of a run. It began at `began_s` on the clock; other times count from there."""

    began_s: float = 0.0
    outcomes: dict[str, SimOutcome] = field(default_factory=dict)
    steps: list[StepOutcome] = field(default_factory=list)
    occupancy: list[Occupancy] = field(default_factory=list)
    ended_s: float = 0.0
    iterations: int = 0


class Simulation:
    """One run. `trainers` are opened before the first arrival."""

    def __init__(
        self,
        loop: EngineLoop,
        clock: WaitingClock,
        arrivals: Sequence[Arrival],
        trainers: Sequence[TrainerSpec] = (),
        *,
        sample_s: float = 1.0,
        leaps: SimExecutor | None = None,
        supply: Callable[[], TrainingStep] | None = None,
        offline: Iterator[Request] | None = None,
    ) -> None:
        """Occupancy is sampled every `sample_s` seconds. With `leaps`, which is the loop's executor
        and must have no listener, equal iterations are advanced at once. `supply` makes a step
        whenever fewer than two are queued; the run then ends with its last request. Of `offline`,
        some are always in the engine, from the beginning on."""
        self._loop, self._clock = loop, clock
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival.at_s)
        self._next = 0
        self._sample_s = sample_s
        self._executor = leaps
        self._leaper = Leaper(loop.scheduler) if leaps is not None else None
        self._sample_due_s = 0.0
        self._supply = supply
        self._offline = offline
        self._ahead = self._ahead_tokens = 0
        self._unfinished = 0  # choices
        self._ended = (0.0, 0)  # when choices ended last, and how many
        for spec in trainers:
            loop.teaching.open_trainer(spec)
        self._origin_s = clock.now()  # opening trainers on a real device does not count
        self.report = SimReport(self._origin_s)

    def run(
        self,
        until_s: float = math.inf,
        on_progress: Callable[[float], None] = lambda now: None,
    ) -> SimReport:
        """Run until everything has ended, or until the clock has passed `until_s`. To go on, call
        it again.

        Raises `PolicyFault` if the policy stops running anything although requests exist.
        """
        report = self.report
        while (now := self._now()) < until_s:
            self._admit(now)
            if self._supply is not None and not self._feed(self._supply):
                break
            if not self._loop.has_work:
                self._check_stall()
                if not self._sleep(until_s):
                    break
                continue
            events = self._leap(until_s)
            if not events:
                events = self._loop.step(self._urgent)
                report.iterations += 1
            self._take(events)
            if now >= self._sample_due_s:
                self._sample(now)
                on_progress(now)
        self._take(self._loop.land())
        report.ended_s = self._now()
        return report

    def arrive(self, arrival: Arrival) -> None:
        """One more arrival, after all others."""
        assert not self._arrivals or self._arrivals[-1].at_s <= arrival.at_s
        self._arrivals.append(arrival)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt with its answer: of the model, and that its KV cache holds."""
        scheduler = self._loop.scheduler
        cache = scheduler.cache
        return min(scheduler.max_model_len, cache.num_blocks * cache.block_size)

    def can_take(self, request: Request, at_s: float) -> bool:
        """Run until `at_s`; then, whether the engine has places for `request`, and its last request
        does not wait for its first token."""
        self.run(at_s)
        if self._arrivals:
            last = self._arrivals[-1].work
            assert isinstance(last, Request), "another engine does not train"
            outcome = self.report.outcomes.get(last.request_id)
            if outcome is None or not (outcome.error or outcome.first_s <= at_s):
                return False
        ended_s, ended = self._ended  # the last iteration may have ended after `at_s`
        held = self._unfinished + (ended if ended_s > at_s else 0)
        return held + request.n <= self._loop.scheduler.budgets.max_sequences

    def _leap(self, until_s: float) -> list[TokenEvent]:
        """Advance equal iterations up to the next arrival. Empty if there is only one."""
        if self._leaper is None or self._executor is None:
            return []
        most = self._leaper.reach()
        if most < 1:
            return []
        due_s = self._arrivals[self._next].at_s if self._next < len(self._arrivals) else math.inf
        executor, clock = self._executor, self._clock
        events, end_s, made = self._leaper.leap(
            most,
            executor.seconds_of,
            self._origin_s + min(due_s, until_s),
            clock.now(),
            executor.token_of,
            executor.host_s,
        )
        executor.work_until(end_s)
        self.report.iterations += made
        return events

    def _now(self) -> float:
        return self._clock.now() - self._origin_s

    def _urgent(self) -> bool:
        """Whether an online request has arrived that was not added yet."""
        now, arrivals = self._now(), self._arrivals
        for place in range(self._next, len(arrivals)):
            if arrivals[place].at_s > now:
                return False
            work = arrivals[place].work
            if isinstance(work, Request) and work.work_class is WorkClass.ONLINE:
                return True
        return False

    def _admit(self, now: float) -> None:
        arrivals = self._arrivals
        while self._next < len(arrivals) and arrivals[self._next].at_s <= now:
            arrival = arrivals[self._next]
            self._next += 1
            if isinstance(arrival.work, TrainingStep):
                self._loop.teaching.add_step(arrival.work)
            else:
                self._add(arrival.work, arrival.at_s)
        while self._offline and self._ahead < _OFFLINE_AHEAD and self._ahead_tokens < POOL_TOKENS:
            if (request := next(self._offline, None)) is None:
                self._offline = None
            elif self._add(request, now):
                self._ahead += request.n
                self._ahead_tokens += request.n * len(request.prompt)

    def _add(self, request: Request, at_s: float) -> bool:
        """False if the engine refuses it; a server would continue, too."""
        outcome = SimOutcome(
            request.request_id, at_s, len(request.prompt), request.slo, request.work_class
        )
        self.report.outcomes[request.request_id] = outcome
        try:
            self._loop.add(replace(request, arrival_s=self._origin_s + at_s))
        except InvalidRequest:
            outcome.error = "refused"
            return False
        self._unfinished += request.n
        return True

    def _feed(self, supply: Callable[[], TrainingStep]) -> bool:
        """Keep steps queued. False if no requests are left."""
        if not self._unfinished and self._next == len(self._arrivals):
            return False
        for _ in range(len(self._loop.scheduler.learning.queued), _STEPS_AHEAD):
            self._loop.teaching.add_step(supply())
        return True

    def _check_stall(self) -> None:
        stalled_s = self._loop.scheduler.next_decision.stalled_s(self._clock.now())
        if stalled_s > _STALL_S:
            stats = self._loop.stats()
            raise PolicyFault(
                f"the scheduling policy has run nothing for {stalled_s:.1f} s although "
                f"{stats.waiting} requests wait and {stats.running} run, and does not say when it "
                "will (Decision.wake_at); it would never end"
            )

    def _sleep(self, until_s: float) -> bool:
        """Jump to the next arrival or to the policy's next decision. False if there is neither."""
        now = self._now()
        due_s = self._arrivals[self._next].at_s if self._next < len(self._arrivals) else math.inf
        due_s = min(due_s, now + self._loop.pause_s)
        if math.isinf(due_s):
            return False
        self._clock.advance(max(0.0, min(due_s, until_s) - now))
        return True

    def _sample(self, now: float) -> None:
        stats = self._loop.stats()
        self.report.occupancy.append(
            Occupancy(now, stats.running, stats.waiting, stats.kv_blocks_used)
        )
        self._sample_due_s = now + self._sample_s

    def _take(self, events: Sequence[TokenEvent]) -> None:
        now, outcomes = self._now(), self.report.outcomes
        if ended := sum(event.finish_reason is not None for event in events):
            self._ended = (now, ended)
        for event in events:
            outcome = outcomes[event.request_id]
            if event.tokens:
                if outcome.output_tokens == 0:
                    outcome.first_s = now
                    outcome.cached_tokens = event.cached_tokens
                outcome.output_tokens += len(event.tokens)
                outcome.last_s = now
            if event.finish_reason is None:
                continue
            self._unfinished -= 1
            if self._offline is not None and outcome.work_class is WorkClass.OFFLINE:
                self._ahead -= 1
                self._ahead_tokens -= outcome.prompt_tokens
            outcome.finished = event.finish_reason is not FinishReason.ERROR
            if not outcome.finished:
                outcome.error = event.error or "failed"
        for learned in self._loop.teaching.take_learned():
            if isinstance(learned, StepOutcome):
                self.report.steps.append(learned)
