"""Keeps the state of all requests and of learning: add, abort, schedule, apply.

Returns plans and never runs anything; takes results and returns events. Knows no policy, no tensor
and no text. Invariant: no sequence of a plan is released between `schedule` and `apply` (`Flight`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from tandem.core.errors import InvalidRequest
from tandem.core.events import ModelInfo, TokenEvent
from tandem.core.lengths import Forecast
from tandem.core.plan import DEVICE_LANE, LanePlan, StepPlan, StepResult, lost
from tandem.core.request import Request
from tandem.core.sequence import FinishReason, Sequence
from tandem.core.slo import DEFAULT_SLO, Slo, WorkClass
from tandem.core.version import AdapterVersion
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.memory import DemandWindow
from tandem.kv.cache import KVCache
from tandem.scheduling.admission import Admission
from tandem.scheduling.flight import Flight
from tandem.scheduling.kv_view import KVView
from tandem.scheduling.learning import Learning
from tandem.scheduling.limits import check_request
from tandem.scheduling.next_decision import NextDecision
from tandem.scheduling.progress import Progress
from tandem.scheduling.state import SchedulerState, moment_of
from tandem.scheduling.training import LearningLimits
from tandem.scheduling.view import Budgets, Policy, View

# The next plan is decided so long before the device is free. On hosts of GPUs, deciding and
# preparing a pass took 1.5 ms.
_LEAD_S = 2e-3
# Of a preemptible plan's layers, those that the device has not computed when its result comes.
_LAYERS_AHEAD = 2


class Scheduler:
    """Sequences, blocks and the policy of one engine. Called from one thread.

    Callers hand steps and scores to `learning` directly, between two iterations, then call `wake`.
    `flight` has the plans whose results are not there yet.
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
        self._kv = KVView(cache, self.demand)
        self._policy = policy
        self._lanes = lanes
        self.max_model_len = model.max_model_len
        self._eos = frozenset(model.eos_token_ids)
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
        self.flight = Flight(self.state, cache, self.max_model_len, self._steps)
        self.progress = Progress(
            self.state,
            cache,
            self.flight,
            max_sequences=budgets.max_sequences,
            max_model_len=self.max_model_len,
        )
        self.next_decision = NextDecision()
        self._was_quiet, self._decided_at = False, moment_of(self.state)
        # When the last plan that was decided could begin, and when its slices are computed.
        self._began_s = self._free_s = -math.inf
        self._last_plan: StepPlan | None = None
        self._last_results: tuple[StepResult, ...] = ()

    # ------------------------------------------------------------------ requests

    def ready_at(self, now: float) -> float:
        """When a call of `schedule` should be made for a plan: now, later, or never (infinity).

        It is later while the device still computes slices. It is later or never while the policy
        defers all work; any command ends that.
        """
        if self.flight.plans:
            return now
        if not (self.state.all or self.learning.has_work):
            return math.inf
        # While slices trail, requests may still come that are to be in the next plan.
        at_s = max(now, self._free_s - _LEAD_S)
        return at_s if self.next_decision.at_s is None else max(at_s, self.next_decision.at_s)

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
        self.progress.requests[request.request_id] = list(sequences)
        self.state.add(sequences[0])
        self.cache.add_reader(sequences[0])
        for sibling in sequences[1:]:
            self.state.add_fork(sequences[0], sibling)
        return [seq.seq_id for seq in sequences]

    def is_active(self, request_id: str) -> bool:
        """True while a choice of this request has not finished, or a plan in flight has it."""
        return request_id in self.progress.requests or request_id in self.learning.scores

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End one choice of a request, all its choices, or a score. Unknown ids are ignored.

        Makes no event. Called between two iterations only.
        """
        self.next_decision.wake()
        self.learning.scores.abort(request_id)
        choices = self.progress.requests.get(request_id, ())
        for seq in [seq for seq in choices if index is None or seq.index == index]:
            self.progress.finish(seq, FinishReason.ABORT)

    def foresee(self, request_id: str, length: Forecast) -> None:
        """More is known now of how long a request's answers will be. Unknown ids are ignored."""
        for seq in self.progress.requests.get(request_id, ()):
            seq.request = replace(seq.request, length=length)

    def switch_adapter(self, request_id: str, version: AdapterVersion) -> bool:
        """Continue a request's choices under another version, with their tokens and their KV.
        Called between two iterations. False if there is no such request."""
        choices = self.progress.requests.get(request_id, ())
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
        self.next_decision.wake()

    # ------------------------------------------------------------------ iteration

    def schedule(self, now: float) -> StepPlan | None:
        """Let the policy decide and grant what fits; None if nothing can run now."""
        assert not self.flight.plans, "the last plan has not been applied"
        if not (self.state.all or self.learning.has_work):
            return None
        trailing_s = max(0.0, self._free_s - now)
        self._began_s = now + trailing_s
        view = View(
            self._began_s,
            self.budgets,
            self._last_plan,
            self._last_results,
            self.latency,
            self._lanes,
            self._kv,
            self.state.starts,
            self.state.default_slo,
            trailing_s,
            self.state,
            self.learning,
        )
        self._was_quiet, self._decided_at = self._quiet, moment_of(self.state)
        decision, moves = self._policy.decide(view), self.state.moves
        plan = self._admission.plan(next(self._steps), decision, now)
        self._observe_demand(now)
        if plan is not None:
            self.flight.begin(plan)
            self.next_decision.ran()
        else:
            some = bool(self.state.num_waiting or self.state.num_running)
            changed = self.state.moves != moves
            self.next_decision.ran_nothing(now, decision.wake_at, changed=changed, requests=some)
        return plan

    def apply(self, results: Iterable[StepResult], now: float) -> list[TokenEvent]:
        """Advance each sequence of the oldest plan in flight by its result; returns events to
        deliver."""
        plan, left_out = self.flight.land()
        results = tuple(results)
        if plan.lanes[0].follows:  # there was no decision
            self._observe_demand(now)
        else:
            self._last_plan, self._last_results = plan, results
        self.progress.release_ended()
        events: list[TokenEvent] = []
        stopped = {result.lane for result in results if result.stopped}
        spans = [span for lane in plan.lanes if lane.lane not in stopped for span in lane.spans]
        failed = {seq_id: reason for result in results for seq_id, reason in result.failed}
        scores = {score.seq_id: score for result in results for score in result.scores}
        draws = {draw.seq_id: draw for result in results for draw in result.draws}
        for span in spans:
            seq = self.state.all.get(span.seq_id)
            if seq is None or seq.seq_id in left_out:  # it ended, or its step failed before
                continue
            if seq.scoring is not None:
                score, problem = scores.get(seq.seq_id), failed.get(seq.seq_id)
                self.learning.take_span(seq, span, score, problem, now)
                continue
            score = scores.get(span.seq_id)
            self.progress.advance(seq, span, score, draws, failed, now, events)
        self._learn(plan, results, now)
        return events

    def fail_step(self, reason: str, now: float) -> list[TokenEvent]:
        """The oldest plan in flight could not be computed: end its sequences with an error."""
        return self.apply([lost(lane, reason) for lane in self.flight.plans[0].lanes], now)

    def _learn(self, plan: StepPlan, results: Iterable[StepResult], now: float) -> None:
        """What the results say beside the sequences': times, and pieces of learning."""
        lanes = {lane.lane: lane for lane in plan.lanes}
        for result in results:
            lane = lanes[result.lane]
            if lane.lane == self._lanes[0]:
                ended_s = min(now, self._began_s + result.elapsed_s)
                self._free_s = max(self._began_s, ended_s) + self._trailing_s(lane, result)
            if lane.lane == self._lanes[0] and lane.share == 1.0 and not lane.follows:
                self.latency.observe(lane, result, self.learning.backward_of)
            elif lane.lane == self._lanes[0]:
                self.latency.after(result.forward_s)
            for kept in result.kept:
                self.learning.take_kept(kept)
            for piece in result.slices:
                self.learning.take_slice(piece, now)
            for update in result.updates:
                self.learning.take_update(update, now)

    def _trailing_s(self, lane: LanePlan, result: StepResult) -> float:
        """Predicted seconds of the slices that the device still computes; 0 while that would be a
        guess, since nothing else is given to the device meanwhile."""
        if self.latency.guessed:
            return 0.0
        pieces = [each for each in result.slices if math.isnan(each.elapsed_s) and not each.problem]
        if lane.preemptible:  # the device had few layers left when its result came
            pieces = pieces[-1:]
        seconds = 0.0
        for each in pieces:
            layers = each.hi - each.lo
            if lane.preemptible:
                layers = min(layers, _LAYERS_AHEAD)
            if (work := self.learning.backward_of(each.micro_batch)) is not None:
                seconds += self.latency.slice_s(work, layers)
        return seconds

    def _observe_demand(self, now: float) -> None:
        if self.demand.due(now):
            self.demand.observe(now, self._kv.held_blocks(WorkClass.ONLINE))
