"""The engine loop: take commands, decide, plan, execute, apply, deliver.

Joins a scheduler, an executor and the adapter registry. Knows no process, socket, tensor or text.
Invariant: an error of a request or step ends the sequences concerned, never the loop. The loop
waits for a disk only where an adapter is loaded by path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from tandem.adapters.files import inspect_adapter
from tandem.adapters.registry import AdapterRegistry
from tandem.core.clock import Clock
from tandem.core.errors import AccountingError, AdapterError, InvalidRequest, NotFound, OutOfMemory
from tandem.core.events import EngineStats, ModelInfo, TokenEvent
from tandem.core.plan import LanePlan, StepPlan, StepResult
from tandem.core.ports import EndDraws, Executor, TrainerSnapshot, Urgent, never
from tandem.core.request import Request
from tandem.core.slo import WorkClass
from tandem.core.training import Score, ScoreRequest, TrainerSpec, TrainerState, TrainingStep
from tandem.core.version import AdapterVersion
from tandem.engine.counters import Counters
from tandem.engine.history import History, rows_by_work
from tandem.engine.holds import Holds
from tandem.scheduling.learning import Learned
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.scores import ScoreFailed

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
    works. With `switch`, requests in flight continue with each new version of their adapter (MACE);
    scores never do.
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
        self._switch = switch
        self._counters = Counters()
        self._history = History()
        self._stalled = False
        self._shortages = 0
        self.on_plan: Callable[[LanePlan, StepResult], None] | None = None
        self.timer: Callable[[], float] = clock.now
        cache = scheduler.cache
        self._registry = AdapterRegistry(
            lambda version: self._read(version)(version),
            executor.drop_adapter,
            retire=cache.retire,
            revive=lambda content_hash: cache.retire(content_hash, retired=False),
            forget=cache.drop_adapter,
            max_loaded=max_loaded_adapters,
        )
        self._holds = Holds(self._registry, scheduler.is_active)

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
    def adapters(self) -> dict[str, AdapterVersion]:
        """Current adapter versions by name."""
        return self._registry.current

    def is_loaded(self, version: AdapterVersion) -> bool:
        """Whether publishing this version reads no file."""
        return self._registry.is_loaded(version.content_hash)

    @property
    def has_work(self) -> bool:
        """True if an iteration may have something to run now."""
        now = self._clock.now()
        return self._scheduler.ready_at(now) <= now

    @property
    def exhausted(self) -> bool:
        """True if several iterations in a row had no memory: another process may use it."""
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
        version = self._registry.pin(request.adapter)
        now, said_s = self._clock.now(), request.arrival_s
        arrival_s = said_s if said_s and now - _OLDEST_S <= said_s <= now else now
        try:
            seq_ids = self._scheduler.add(replace(request, arrival_s=arrival_s), version)
        except BaseException:
            self._registry.unpin(version)
            raise
        self._holds.add(request.request_id, version, grammar, seq_ids)

    def read_request(self, request: Request) -> Callable[[], None]:
        """The slow part of `add`, for any thread: its grammar is compiled, if it has one. Calling
        the result does the rest. Both raise `InvalidRequest`."""
        grammar = request.sampling.grammar
        ready = None if grammar is None else self._executor.compile_grammar(grammar)
        return lambda: self.add(request, ready)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End one choice, all choices, or a score. Idempotent."""
        self._scheduler.abort(request_id, index)
        self._holds.let_go([request_id])

    def load_adapter(
        self, name: str, path: str, restore: AdapterVersion | None = None
    ) -> AdapterVersion:
        """Make the files at `path` the current version of `name`. Raises `AdapterError`.

        With `restore`, that version becomes current again, or an error if its files have changed.
        """
        return self.read_adapter(name, path, restore)()

    def read_adapter(
        self, name: str, path: str, restore: AdapterVersion | None = None
    ) -> Callable[[], AdapterVersion]:
        """The blocking part of `load_adapter`, for any thread; calling the result does the rest."""
        files = inspect_adapter(path)
        if restore is not None and files.content_hash != restore.content_hash:
            raise AdapterError(f"the files of {restore.label} at {path} have changed; load it anew")
        number = restore.number if restore is not None else 0
        return self.read_version(AdapterVersion(name, number, files.content_hash, str(files.path)))

    def read_version(self, version: AdapterVersion) -> Callable[[], AdapterVersion]:
        """The blocking part of `publish_adapter`, for any thread; its result does the rest."""
        put = None if self.is_loaded(version) else self._read(version)
        return lambda: self._publish(version, load=put)

    def _read(self, version: AdapterVersion) -> Callable[[AdapterVersion], None]:
        """Read the files of `version`, and check that they still have its hash."""
        put = self._executor.read_adapter(version)
        if inspect_adapter(version.path).content_hash != version.content_hash:
            raise AdapterError(f"{version.path} changed while it was being read; load it again")
        return lambda _: put()

    def unload_adapter(self, name: str) -> None:
        """Remove a name. Raises `NotFound`."""
        if name not in self._registry.current:
            raise NotFound(f"there is no adapter {name!r}", param="name")
        self._registry.unload(name)

    def publish_adapter(self, version: AdapterVersion) -> AdapterVersion:
        """Make `version` current. Its files are read only if its content is not loaded.

        Raises `AdapterError`.
        """
        return self._publish(version)

    def _publish(
        self, version: AdapterVersion, load: Callable[[AdapterVersion], None] | None = None
    ) -> AdapterVersion:
        """`AdapterRegistry.publish`. With `switch`, requests of this name continue with the
        version, even those whose version was unloaded meanwhile."""
        version = self._registry.publish(version, load=load)
        if self._switch:
            self._holds.switch(version, self._scheduler.switch_adapter)
        return version

    # ------------------------------------------------------------------ learning

    def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """Open a trainer. One of the same name must be closed first. Raises `AdapterError`."""
        state = self._executor.open_trainer(spec)
        self._scheduler.learning.open_trainer(state)
        return state

    def read_trainer(self, spec: TrainerSpec) -> Callable[[], TrainerState]:
        """The blocking part of `open_trainer`, for any thread. Calling the result does the rest."""
        put = self._executor.read_trainer(spec)

        def rest() -> TrainerState:
            state = put()
            self._scheduler.learning.open_trainer(state)
            return state

        return rest

    def close_trainer(self, name: str) -> list[str]:
        """Free everything of a trainer; returns the ids of its steps. Idempotent."""
        cancelled = self._scheduler.learning.close_trainer(name)
        self._scheduler.wake()
        self._executor.close_trainer(name)
        return cancelled

    def add_step(self, step: TrainingStep) -> None:
        """Queue a training step. Raises `InvalidRequest` if it can never run."""
        self._scheduler.learning.add_step(step, self._clock.now())
        self._scheduler.wake()

    def cancel_steps(self, trainer: str) -> list[str]:
        """Cancel a trainer's steps; returns their ids. Idempotent."""
        cancelled = self._scheduler.learning.cancel_steps(trainer)
        self._scheduler.wake()
        return cancelled

    def add_score(self, request: ScoreRequest) -> None:
        """Queue a score. Its adapter version is pinned now. Raises `InvalidRequest`."""
        if self._scheduler.is_active(request.request_id):
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        if request.adapter is not None and request.trainer is not None:
            raise InvalidRequest("score under an adapter or under a trainer, not under both")
        version = self._registry.pin(request.adapter)
        try:
            self._scheduler.learning.add_score(request, version, self._clock.now())
        except BaseException:
            self._registry.unpin(version)
            raise
        self._holds.add(request.request_id, version)
        self._scheduler.wake()

    def take_learned(self) -> list[Learned]:
        """Steps and scores that have ended since the last call."""
        learned = self._scheduler.learning.take_ended()
        scores = [each for each in learned if isinstance(each, Score | ScoreFailed)]
        self._holds.let_go(each.request_id for each in scores)
        return learned

    def snapshot_trainer(self, name: str) -> TrainerSnapshot:
        """Copy a trainer's state for `adopt`. Raises `NotFound`, `AdapterError`."""
        return self._executor.snapshot_trainer(name)

    def adopt(
        self, snapshot: TrainerSnapshot, name: str, path: str, content_hash: str
    ) -> AdapterVersion:
        """Make a snapshot that was written to `path` the current version of `name`.

        Reads no file. Raises `AdapterError`.
        """
        return self._publish(
            AdapterVersion(name, 0, content_hash, path),
            load=lambda version: self._executor.adopt(snapshot, version.content_hash),
        )

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
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=scheduler.generation_tokens,
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
        plan = self._scheduler.schedule(now)
        self._report_stall(now)
        if plan is None:
            return []
        submitted = self.timer()
        try:
            results = self._execute(plan, urgent)
        except OutOfMemory as error:
            logger.exception("step %d failed", plan.step)
            self._shortages += 1
            events = self._scheduler.fail_step(str(error), self._clock.now())
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            events = self._scheduler.fail_step(f"the iteration failed: {error}", self._clock.now())
        else:
            short = any(result.lacks_memory for result in results)
            self._shortages = self._shortages + 1 if short else 0
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
        self._holds.let_go(event.request_id for event in events if event.finish_reason)
        if self._check_every_step:
            self._scheduler.cache.check()
        return events

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

    def _report_stall(self, now: float) -> None:
        """Report once that requests wait and the policy runs nothing."""
        stalled = self._scheduler.asking.stalled_s(now) > _STALL_S
        if stalled and not self._stalled:
            logger.error(
                "the scheduling policy runs nothing although %d requests wait and %d run",
                self._scheduler.state.num_waiting,
                self._scheduler.state.num_running,
            )
        self._stalled = stalled

    def _execute(self, plan: StepPlan, urgent: Urgent) -> list[StepResult]:
        for lane in plan.lanes:
            self._executor.submit(lane, urgent)
        results: list[StepResult] = []
        while len(results) < len(plan.lanes):
            results.extend(self._executor.poll())
        return results
