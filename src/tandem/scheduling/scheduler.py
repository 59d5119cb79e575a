"""Keeps the state of all requests and of learning: add, abort, schedule, apply.

Returns plans and never runs anything; takes results and returns events. Knows no policy, no tensor
and no text. Invariant: no sequence of a plan is released between `schedule` and `apply`, since
`abort` is called only between iterations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from tandem.core.errors import InvalidRequest
from tandem.core.events import ModelInfo, RequestTimes, TokenEvent
from tandem.core.lengths import Forecast
from tandem.core.plan import (
    DEVICE_LANE,
    DrawResult,
    ScoreResult,
    Span,
    StepPlan,
    StepResult,
    lost,
)
from tandem.core.request import Request
from tandem.core.sequence import FinishReason, Sequence, SequenceStatus
from tandem.core.slo import DEFAULT_SLO, Slo, WorkClass
from tandem.core.version import AdapterVersion
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.memory import DemandWindow
from tandem.kv.cache import KVCache
from tandem.scheduling.admission import Admission
from tandem.scheduling.kv_view import KVView
from tandem.scheduling.learning import Learning
from tandem.scheduling.limits import check_request
from tandem.scheduling.next_decision import NextDecision
from tandem.scheduling.state import SchedulerState, moment_of
from tandem.scheduling.training import LearningLimits
from tandem.scheduling.view import Budgets, Policy, View


class Scheduler:
    """Sequences, blocks and the policy of one engine. Called from one thread.

    Callers hand steps and scores to `learning` directly, between two iterations, then call `wake`.
    `prompt_tokens` and `generation_tokens` are totals since the start.
    """

    def __init__(
        self,
        policy: Policy,
        cache: KVCache,
        budgets: Budgets,
        model: ModelInfo,
        *,
        default_slo: Slo = DEFAULT_SLO,
        rates: Rates | None = None,
        lanes: tuple[str, ...] = (DEVICE_LANE,),
    ) -> None:
        """Without `rates` the time model starts from guesses. The executor's `lanes` share the KV
        cache; each lane has the whole of `budgets` for itself."""
        self.state = SchedulerState(default_slo)
        self.cache = cache
        self.budgets = budgets
        self.latency = LatencyModel(rates or Rates.guess_for(model))
        self.demand = DemandWindow()
        self._kv = KVView(cache, self.state, self.demand)
        self._policy = policy
        self._lanes = lanes
        self.max_model_len = model.max_model_len
        self._eos = frozenset(model.eos_token_ids)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._requests: dict[str, list[Sequence]] = {}
        self._seq_ids = count()
        self.learning = Learning(
            self.state,
            cache,
            self._seq_ids,
            LearningLimits(
                model.num_layers,
                model.recording_tokens,
                model.max_model_len,
                cache.num_blocks * cache.block_size,
            ),
            self.latency if policy.traits.records_in_parts else None,
        )
        self._admission = Admission(self.state, cache, self.learning, budgets, self.latency, lanes)
        self._steps = count()
        self.next_decision = NextDecision()
        self._was_quiet, self._decided_at = False, moment_of(self.state)
        self._in_flight: StepPlan | None = None
        self._last_plan: StepPlan | None = None
        self._last_results: tuple[StepResult, ...] = ()

    # ------------------------------------------------------------------ requests

    def ready_at(self, now: float) -> float:
        """When a call of `schedule` may return a plan: now, later, or never (infinity).

        It is later or never only while the policy defers all work. Any command resets it to now.
        """
        if not (self.state.all or self.learning.has_work):
            return math.inf
        return now if self.next_decision.at_s is None else self.next_decision.at_s

    @property
    def preemptions(self) -> int:
        """Preemptions of requests since the start."""
        return self._admission.preemptions

    @property
    def steady(self) -> bool:
        """Whether the next decision is the last one again, until a request comes or ends."""
        traits, seen = self._policy.traits, self._decided_at == moment_of(self.state)
        settled = not self.state.num_waiting or (traits.waits_alike and seen)
        return settled and traits.decodes_alike and self._was_quiet and self._quiet

    @property
    def _quiet(self) -> bool:
        return self.state.of_one_class and not self.learning.has_work

    def add(self, request: Request, adapter: AdapterVersion | None) -> list[int]:
        """Take a request; the ids of its sequences. Raises `InvalidRequest` if it could never run
        to its end here."""
        if self.is_active(request.request_id):
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        check_request(request, self.max_model_len, self.cache.num_blocks * self.cache.block_size)
        self.next_decision.wake()
        stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stop_ids |= self._eos
        sequences = [
            Sequence(
                next(self._seq_ids), request, index, adapter, [*request.prompt], stop_ids=stop_ids
            )
            for index in range(request.n)
        ]
        self._requests[request.request_id] = list(sequences)
        self.state.add(sequences[0])
        self.cache.add_reader(sequences[0])
        for sibling in sequences[1:]:
            self.state.add_fork(sequences[0], sibling)
        return [seq.seq_id for seq in sequences]

    def is_active(self, request_id: str) -> bool:
        """True while a choice of this request has not finished."""
        return request_id in self._requests or request_id in self.learning.scores

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End one choice of a request, all its choices, or a score. Unknown ids are ignored.

        Makes no event. Called between two iterations only.
        """
        assert self._in_flight is None
        self.next_decision.wake()
        self.learning.scores.abort(request_id)
        chosen = [
            seq for seq in self._requests.get(request_id, ()) if index is None or seq.index == index
        ]
        for seq in chosen:
            self._finish(seq, FinishReason.ABORT)

    def foresee(self, request_id: str, length: Forecast) -> None:
        """More is known now of how long a request's answers will be. Unknown ids are ignored."""
        for seq in self._requests.get(request_id, ()):
            seq.request = replace(seq.request, length=length)

    def switch_adapter(self, request_id: str, version: AdapterVersion) -> bool:
        """Continue a request's choices under another version, with their tokens and their KV.
        Called between two iterations. False if there is no such request."""
        assert self._in_flight is None
        choices = self._requests.get(request_id, ())
        for seq in choices:
            self.cache.remove_reader(seq)
            if seq.adapter is None or seq.adapter.content_hash != version.content_hash:
                seq.mixed = self.cache.holds(seq)
            seq.adapter = version
            if seq.seq_id in self.state.waiting:
                self.cache.add_reader(seq)
        return bool(choices)

    def wake(self) -> None:
        """`learning` was changed, so the policy decides again."""
        assert self._in_flight is None
        self.next_decision.wake()

    # ------------------------------------------------------------------ iteration

    def schedule(self, now: float) -> StepPlan | None:
        """Let the policy decide and grant what fits; None if nothing can run now."""
        assert self._in_flight is None, "the last plan has not been applied"
        if not (self.state.all or self.learning.has_work):
            return None
        view = View(
            now,
            self.budgets,
            self._last_plan,
            self._last_results,
            self.latency,
            self._lanes,
            self._kv,
            self.state.starts,
            self.state.default_slo,
            self.state,
            self.learning,
        )
        self._was_quiet, self._decided_at = self._quiet, moment_of(self.state)
        decision, moves = self._policy.decide(view), self.state.moves
        plan = self._admission.plan(next(self._steps), decision, now)
        if self.demand.due(now):
            self.demand.observe(now, self._kv.held_blocks(WorkClass.ONLINE))
        self._in_flight = plan
        if plan is not None:
            self.next_decision.ran()
        else:
            some = bool(self.state.num_waiting or self.state.num_running)
            changed = self.state.moves != moves
            self.next_decision.ran_nothing(now, decision.wake_at, changed=changed, requests=some)
        return plan

    def apply(self, results: Iterable[StepResult], now: float) -> list[TokenEvent]:
        """Advance each sequence of the plan in flight by its result; returns events to deliver."""
        plan = self._in_flight
        assert plan is not None, "no plan is in flight"
        results = tuple(results)
        self._in_flight, self._last_plan, self._last_results = None, plan, results
        events: list[TokenEvent] = []
        stopped = {result.lane for result in results if result.stopped}
        spans = [span for lane in plan.lanes if lane.lane not in stopped for span in lane.spans]
        failed = {seq_id: reason for result in results for seq_id, reason in result.failed}
        scores = {score.seq_id: score for result in results for score in result.scores}
        draws = {draw.seq_id: draw for result in results for draw in result.draws}
        for span in spans:
            seq = self.state.all.get(span.seq_id)
            if seq is None:  # its step failed in an earlier span
                continue
            if seq.scoring is not None:
                score, problem = scores.get(seq.seq_id), failed.get(seq.seq_id)
                self.learning.take_span(seq, span, score, problem, now)
                continue
            self._advance(seq, span, scores.get(span.seq_id), draws, failed, now, events)
        lanes = {lane.lane: lane for lane in plan.lanes}
        for result in results:
            lane = lanes[result.lane]
            if lane.lane == self._lanes[0] and lane.share == 1.0:
                self.latency.observe(lane, result, self.learning.backward_of)
            elif lane.lane == self._lanes[0]:
                self.latency.after(result.forward_s)
            for kept in result.kept:
                self.learning.take_kept(kept)
            for piece in result.slices:
                self.learning.take_slice(piece, now)
            for update in result.updates:
                self.learning.take_update(update, now)
        return events

    def fail_step(self, reason: str, now: float) -> list[TokenEvent]:
        """The plan in flight could not be computed: end its sequences with an error."""
        plan = self._in_flight
        assert plan is not None
        return self.apply([lost(lane, reason) for lane in plan.lanes], now)

    # ------------------------------------------------------------------ inside

    def _advance(
        self,
        seq: Sequence,
        span: Span,
        score: ScoreResult | None,
        draws: dict[int, DrawResult],
        failed: dict[int, str],
        now: float,
        events: list[TokenEvent],
    ) -> None:
        """Apply the result of one span; appends the events to deliver to `events`."""
        if seq.seq_id in failed:
            gone = [seq, *self.state.take_forks(seq)]
            events.extend(self._fail(gone, failed[seq.seq_id], now))
            return
        seq.computed = span.start + len(span.tokens)
        self.cache.commit(seq)
        if score is not None:
            events.extend(self._take_scores(seq, span, score))
        if not span.draws:
            return
        forks = self._start_forks(seq) if seq.seq_id in self.state.forks else ()
        for choice in (seq, *forks):
            if choice.seq_id in failed:
                events.extend(self._fail([choice], failed[choice.seq_id], now))
            elif choice.seq_id in draws:
                events.append(self._take_token(choice, draws[choice.seq_id], now))

    def _take_scores(self, seq: Sequence, span: Span, score: ScoreResult) -> list[TokenEvent]:
        """Events with the log-probabilities of prompt tokens that were not delivered before."""
        skip = seq.scored - (span.start + 1)
        assert skip >= 0, "a position was skipped"
        fresh = score.logprobs[skip:]
        seq.scored += len(fresh)
        if not fresh:
            return []
        return [TokenEvent(seq.request.request_id, seq.index, prompt_logprobs=tuple(fresh))]

    def _start_forks(self, seq: Sequence) -> list[Sequence]:
        forks = self.state.take_forks(seq)
        for child in forks:
            child.first_scheduled_s = seq.first_scheduled_s
            child.cached_tokens = seq.cached_tokens
            child.scored = seq.scored
            if len(self.state.running) < self.budgets.max_sequences:
                child.computed, child.mixed = seq.computed, seq.mixed
                self.cache.fork(seq, child)
                self.state.run_fork(child)
            else:
                self.state.wait_fork(child)
        return forks

    def _take_token(self, seq: Sequence, draw: DrawResult, now: float) -> TokenEvent:
        waiting = seq.status is SequenceStatus.WAITING
        seq.tokens.append(draw.token)
        if waiting:
            self.state.grow(seq)
        self.generation_tokens += 1
        if seq.first_token_s is None:
            seq.first_token_s = now
            self.prompt_tokens += seq.prompt_tokens if seq.index == 0 else 0
        event = TokenEvent(
            seq.request.request_id,
            seq.index,
            (draw.token,),
            (draw.logprob,) if draw.logprob is not None else (),
            adapter=seq.adapter.label if seq.adapter is not None else None,
            cached_tokens=seq.cached_tokens,
            state=draw.state,
        )
        reason = self._ended(seq, draw.token)
        if reason is not None:
            event.finish_reason = reason
            event.stop_token = draw.token if reason is FinishReason.STOP else None
            event.times = RequestTimes.of(seq, now)
            self._finish(seq, reason)
        elif waiting:
            self.cache.add_reader(seq)
        return event

    def _ended(self, seq: Sequence, token: int) -> FinishReason | None:
        sampling, length = seq.request.sampling, len(seq.tokens)
        made = length - seq.prompt_tokens
        # A grammar lets an early end be drawn only where nothing else can follow.
        if token in seq.stop_ids and (made > sampling.min_tokens or sampling.grammar is not None):
            return FinishReason.STOP
        if made >= sampling.max_tokens or length >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _fail(self, sequences: list[Sequence], reason: str, now: float) -> list[TokenEvent]:
        events = []
        for seq in sequences:
            events.append(
                TokenEvent(
                    request_id=seq.request.request_id,
                    index=seq.index,
                    finish_reason=FinishReason.ERROR,
                    adapter=seq.adapter.label if seq.adapter is not None else None,
                    times=RequestTimes.of(seq, now),
                    error=reason,
                )
            )
            self._finish(seq, FinishReason.ERROR)
        return events

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is SequenceStatus.FINISHED:
            return
        self._promote_fork(seq)
        self.cache.remove_reader(seq)
        if self.cache.holds(seq):
            self.cache.release(seq, discard=reason is FinishReason.ERROR)
        if seq.seq_id in self.state.all:
            self.state.remove(seq)
        seq.status = SequenceStatus.FINISHED
        choices = self._requests[seq.request.request_id]
        choices.remove(seq)
        if not choices:
            del self._requests[seq.request.request_id]

    def _promote_fork(self, seq: Sequence) -> None:
        """If choice 0 ends before its siblings share the prompt, the next choice computes it."""
        forks = self.state.take_forks(seq)
        if not forks:
            return
        heir, *others = forks
        heir.scored = seq.scored
        self.state.wait_fork(heir)
        self.cache.add_reader(heir)
        for sibling in others:
            self.state.add_fork(heir, sibling)
