"""The engine loop: take commands, decide, plan, execute, apply, deliver.

Joins a scheduler and an executor. `LoadedAdapters` and `Teaching` have the commands that concern
adapters and learning. Knows no process, socket, tensor or text. Invariant: an error of a request or
step ends the sequences concerned, never the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from tandem.core.clock import Clock
from tandem.core.errors import AccountingError, OutOfMemory
from tandem.core.events import EngineStats, ModelInfo, TokenEvent
from tandem.core.plan import NO_MEMORY, LanePlan, StepPlan, StepResult
from tandem.core.ports import EndDraws, Executor, Urgent, never
from tandem.core.request import Request
from tandem.core.slo import WorkClass
from tandem.engine.counters import Counters
from tandem.engine.history import History, rows_by_work
from tandem.engine.loaded import LoadedAdapters
from tandem.engine.teaching import Teaching
from tandem.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

# An older arrival is not believed: no iteration of a healthy engine takes this long
# (`process.STUCK_S`), so the time comes from the clock of another machine.
_OLDEST_S = 300.0
# A policy that runs nothing for this long although requests exist is reported.
_STALL_S = 1.0
# A single shortage may be a prompt that is too large now. More in a row do not end by themselves.
_MOST_SHORTAGES = 3


class EngineLoop:
    """One engine. All methods are called from one thread.

    `on_plan` is called with every lane's plan and its result, for measurements. `timer` gives the
    seconds that `stats` counts. It is the clock, except where that stands still while the scheduler
    works. With `runs_ahead`, plans may follow (`Flight`), on an executor that gains from it.
    `switch`: see `LoadedAdapters`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        *,
        max_loaded_adapters: int = 32,
        switch: bool = False,
        check_every_step: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._check_every_step = check_every_step
        self._counters = Counters()
        self._history = History()
        self._stalled = False
        self._shortages = 0
        self._ended: list[str] = []  # requests that a plan in flight may have
        # A token of a plan in flight would be told to be of the version that was switched to.
        self.runs_ahead = not switch
        self.on_plan: Callable[[LanePlan, StepResult], None] | None = None
        self.timer: Callable[[], float] = clock.now
        self.adapters = LoadedAdapters(scheduler, executor, most=max_loaded_adapters, switch=switch)
        self.teaching = Teaching(scheduler, executor, self.adapters, clock)

    # ------------------------------------------------------------------ commands

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for a simulator that advances it in leaps."""
        return self._scheduler

    @property
    def info(self) -> ModelInfo:
        """The served model."""
        return self._executor.info

    @property
    def has_work(self) -> bool:
        """True if an iteration may have something to run now."""
        now = self._clock.now()
        return self._scheduler.ready_at(now) <= now

    @property
    def exhausted(self) -> bool:
        """True if several iterations in a row had no memory for requests: another process may use
        it. Learning that has none waits, and is no reason to end the requests."""
        return self._shortages >= _MOST_SHORTAGES

    @property
    def pause_s(self) -> float:
        """Seconds until something may run if no command comes. May be infinite."""
        now = self._clock.now()
        return max(0.0, self._scheduler.ready_at(now) - now)

    def add(self, request: Request, grammar: EndDraws | None = None) -> None:
        """Take a request, with its compiled grammar; its adapter version is pinned now. Raises
        `InvalidRequest`.

        Its own arrival time counts, so a wait for the end of an iteration is included. The time is
        now if it has none, or an impossible one: in the future, or more than `_OLDEST_S` ago.
        """
        version = self.adapters.registry.pin(request.adapter, or_base=request.or_base)
        now, said_s = self._clock.now(), request.arrival_s
        arrival_s = said_s if said_s and now - _OLDEST_S <= said_s <= now else now
        try:
            seq_ids = self._scheduler.add(replace(request, arrival_s=arrival_s), version)
        except BaseException:
            self.adapters.registry.unpin(version)
            raise
        self.adapters.holds.add(request.request_id, version, grammar, seq_ids)

    def read_request(self, request: Request) -> Callable[[], None]:
        """The slow part of `add`, for any thread: its grammar is compiled, if it has one. Calling
        the result does the rest. Both raise `InvalidRequest`."""
        grammar = request.sampling.grammar
        ready = None if grammar is None else self._executor.compile_grammar(grammar)
        return lambda: self.add(request, ready)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End one choice, all choices, or a score. Idempotent."""
        self._scheduler.abort(request_id, index)
        self._ended.append(request_id)
        self._let_go()

    def stats(self, last: int = 0, after: int = 0) -> EngineStats:
        """Counters since the start, current gauges, and the `last` iterations (at most) after the
        iteration `after`. Costs the same however many sequences and blocks there are."""
        scheduler, cache, counters = self._scheduler, self._scheduler.cache, self._counters
        return EngineStats(
            running=scheduler.state.num_running,
            waiting=scheduler.state.num_waiting,
            waiting_tokens=scheduler.state.waiting_tokens,
            kv_blocks_used=cache.held_blocks,
            kv_blocks_cached=cache.cached_blocks,
            kv_blocks_total=cache.num_blocks,
            kv_blocks_held=dict(zip(map(str, WorkClass), cache.held_by_rank, strict=True)),
            prefix_queries_tokens=cache.counters.queries_tokens,
            prefix_hits_tokens=cache.counters.hits_tokens,
            preemptions=scheduler.preemptions,
            prompt_tokens=scheduler.progress.prompt_tokens,
            generation_tokens=scheduler.progress.generation_tokens,
            iterations=counters.iterations,
            iteration_tokens_hist=dict(counters.iteration_tokens_hist),
            iteration_tokens_sum=counters.iteration_tokens_sum,
            schedule_s=counters.schedule_s,
            execute_s=counters.execute_s,
            work_s={work.value: seconds for work, seconds in self._history.seconds.items()},
            check_failures=counters.check_failures,
            training_tokens=scheduler.learning.counters.tokens,
            training_steps=scheduler.learning.counters.steps,
            training_waiting=len(scheduler.learning.queued),
            memory_bytes=dict(self._executor.memory_bytes()),
            prediction_errors={
                **scheduler.latency.errors(),
                "online_blocks": scheduler.demand.errors.report(),
            },
            recent=self._history.last(last, after),
        )

    # ------------------------------------------------------------------ iteration

    def step(self, urgent: Urgent = never) -> list[TokenEvent]:
        """One iteration; returns the events to deliver (empty if nothing could run).

        Preemptible learning ends early once `urgent` says that a request has come.
        """
        began = self.timer()
        now = self._clock.now()
        given = self._scheduler.flight.plans[:1]  # it followed the last one
        plan = given[0] if given else self._scheduler.schedule(now)
        self._report_stall(now)
        if plan is None:
            return []
        submitted = self.timer()
        try:
            results = self._execute(plan, urgent, given=bool(given))
        except OutOfMemory as error:
            logger.exception("step %d failed", plan.step)
            self._shortages += 1
            events = self._scheduler.fail_step(str(error), self._clock.now())
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            events = self._scheduler.fail_step(f"the iteration failed: {error}", self._clock.now())
        except BaseException:  # of an engine in a process that is used by hand, and goes on
            self._scheduler.fail_step("the iteration was interrupted", self._clock.now())
            raise
        else:
            self._count_shortages(plan, results)
            finished = self.timer()
            lanes = list(zip(plan.lanes, results, strict=True))
            rows = rows_by_work(lanes, self._scheduler.state.all)
            events = self._scheduler.apply(results, self._clock.now())
            applied = self.timer()
            self._counters.count(
                sum(rows.values()), submitted - began + applied - finished, finished - submitted
            )
            self._history.add(self._counters.iterations, began, applied - began, lanes, rows)
            if self.on_plan is not None:
                for lane, result in lanes:
                    self.on_plan(lane, result)
        self._ended += [event.request_id for event in events if event.finish_reason]
        self._let_go()
        if self._check_every_step:
            self._scheduler.cache.check()
        return events

    def land(self) -> list[TokenEvent]:
        """Take in the plan that was given ahead, if there is one, and give no other one: its
        events."""
        if not self._scheduler.flight.plans:
            return []
        ahead, self.runs_ahead = self.runs_ahead, False
        try:
            return self.step()
        finally:
            self.runs_ahead = ahead

    def check(self) -> bool:
        """Account for every block. False, and a log line, if something is wrong.

        Called in production when idle: a leak must be reported, but must not stop the server.
        """
        try:
            self._scheduler.cache.check()
        except AccountingError as error:
            logger.error("block accounting: %s", error)
            self._counters.check_failures += 1
            return False
        return True

    def _count_shortages(self, plan: StepPlan, results: list[StepResult]) -> None:
        """Of iterations with requests, how many in a row had no memory for one of them."""
        known = self._scheduler.state.all
        spans = (span for lane in plan.lanes for span in lane.spans)
        if any(known[span.seq_id].scoring is None for span in spans):
            short = any(
                reason == NO_MEMORY and known[seq_id].scoring is None
                for result in results
                for seq_id, reason in result.failed
            )
            self._shortages = self._shortages + 1 if short else 0

    def _report_stall(self, now: float) -> None:
        """Report once that requests wait and the policy runs nothing."""
        stalled = self._scheduler.next_decision.stalled_s(now) > _STALL_S
        if stalled and not self._stalled:
            logger.error(
                "the scheduling policy runs nothing although %d requests wait and %d run",
                self._scheduler.state.num_waiting,
                self._scheduler.state.num_running,
            )
        self._stalled = stalled

    def _let_go(self) -> None:
        """Let go of what ended requests held; later, if a plan in flight has them."""
        self.adapters.holds.let_go(self._ended)
        self._ended = [each for each in self._ended if self._scheduler.is_active(each)]

    def _execute(self, plan: StepPlan, urgent: Urgent, *, given: bool) -> list[StepResult]:
        """Results of `plan`, which the device may have been `given`. While it computes, it is given
        the plan that follows, if that is known."""
        if not given:
            for lane in plan.lanes:
                self._executor.submit(lane, urgent)
        if self.runs_ahead and self._executor.runs_ahead and self._scheduler.steady:
            self._go_ahead()
        results: list[StepResult] = []
        while len(results) < len(plan.lanes):
            results += [each for each in self._executor.poll() if each.step == plan.step]
        return results

    def _go_ahead(self) -> None:
        flight = self._scheduler.flight
        following = flight.follow()
        if following is None:
            return
        try:
            self._executor.submit(following.lanes[0])
        except BaseException as error:  # the same work without a lead will show what is wrong
            flight.drop_following()
            if not isinstance(error, Exception):
                raise
            logger.warning("step %d was not given ahead", following.step, exc_info=True)
