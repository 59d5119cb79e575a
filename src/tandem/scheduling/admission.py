"""Turns a decision into a plan that exceeds no budget.

The one place where a policy's wish meets blocks, tokens, sequence slots, room for recordings and,
where the policy asks, predicted time; it attaches, extends and preempts, but never chooses: order
and victims come from the decision. Invariant: a plan has at most `max_batch_tokens` rows and
`max_sequences` spans, every row has a block, and every recorded one a place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tandem.core.decision import Candidate, Decision, LaneDecision, SliceCandidate
from tandem.core.plan import (
    DEVICE_LANE,
    BackwardSlice,
    BlockCopy,
    Draw,
    LanePlan,
    OpenMicroBatch,
    Span,
    StepPlan,
    Update,
)
from tandem.core.sequence import Sequence, SequenceStatus
from tandem.estimators.latency import LatencyModel
from tandem.kv.cache import KVCache
from tandem.scheduling.learning import Learning
from tandem.scheduling.scoring import chunk_limit, scoring_span
from tandem.scheduling.state import SchedulerState
from tandem.scheduling.time_budget import TimeBudget
from tandem.scheduling.view import Budgets


@dataclass(slots=True)
class _Grant:
    """What one iteration has given away so far.

    Once a recording found no room, no other may be opened: it would keep a large one waiting.
    """

    tokens_left: int
    victims: list[int]
    spans: list[Span] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    granted: set[int] = field(default_factory=set)
    opens: list[OpenMicroBatch] = field(default_factory=list)
    recordings_full: bool = False


class Admission:
    """Grants candidates in order. Changes state and cache; called once an iteration."""

    def __init__(
        self,
        state: SchedulerState,
        cache: KVCache,
        learning: Learning,
        budgets: Budgets,
        latency: LatencyModel,
        lanes: tuple[str, ...] = (DEVICE_LANE,),
    ) -> None:
        self._state = state
        self._cache = cache
        self._learning = learning
        self._budgets = budgets
        self._latency = latency
        self._lanes = lanes
        self.preemptions = 0

    def plan(self, step: int, decision: Decision, now: float) -> StepPlan | None:
        """The plan of this iteration, or None if nothing can run."""
        for seq_id in decision.preempt:
            seq = self._state.running.get(seq_id)
            if seq is not None:
                self._preempt(seq)
        if decision.evict:
            self._cache.evict_first(decision.evict)
        lanes = []
        discards = self._learning.take_discards()
        wishes = decision.lanes or ({self._lanes[0]: LaneDecision(())} if discards else {})
        granted: set[int] = set()  # over all lanes: nothing runs twice
        stepped: set[str] = set()
        for lane, wish in wishes.items():
            assert lane in self._lanes, f"there is no lane {lane}"
            grant = _Grant(
                self._budgets.max_batch_tokens, list(reversed(decision.victims)), granted=granted
            )
            time = self._time_of(wish)
            timed = wish.candidates if time is None else self._in_time(wish.candidates, grant, time)
            self._grant_all(timed, grant, now)
            own = tuple([each for each in wish.slices if each.step_id not in stepped])
            stepped |= {each.step_id for each in own}
            slices, updates = self._grant_slices(own, grant, time)
            if grant.spans or slices or updates or discards or grant.opens:
                lanes.append(
                    LanePlan(
                        step,
                        lane,
                        tuple(grant.spans),
                        tuple(grant.copies),
                        discards,
                        tuple(grant.opens),
                        slices,
                        updates,
                        wish.share,
                        wish.gives_way and not any(span.draws for span in grant.spans),
                    )
                )
                discards = ()
        if decision.evict:
            self._cache.evict_first(())
        return StepPlan(step, tuple(lanes)) if lanes else None

    def _grant_slices(
        self, wishes: tuple[SliceCandidate, ...], grant: _Grant, time: TimeBudget | None
    ) -> tuple[tuple[BackwardSlice, ...], tuple[Update, ...]]:
        """Backward slices of steps, and the updates of those that have nothing else left."""
        slices: list[BackwardSlice] = []
        updates: list[Update] = []
        ending: set[int] = set()
        if wishes and self._learning.scores.sequences:  # nothing else holds an update up
            known, spans = self._state.all, grant.spans
            ending = {span.seq_id for span in spans if span.end == len(known[span.seq_id].tokens)}
        first_wishes: dict[str, SliceCandidate] = {}
        for wish in wishes:
            first_wishes.setdefault(wish.step_id, wish)
        for wish in first_wishes.values():
            owed = self._learning.slices(wish.step_id, wish.max_layers)
            granted = owed if time is None else self._slices_in_time(owed, time)
            slices += granted
            if granted != owed:
                break
            update = self._learning.update(wish.step_id, ending)
            if update is None:
                continue
            if time is not None and not time.take_update():
                break
            updates.append(update)
        return tuple(slices), tuple(updates)

    def _time_of(self, wish: LaneDecision) -> TimeBudget | None:
        if wish.seconds is None:
            return None
        return TimeBudget(wish.seconds, self._latency, self._cache.block_size)

    def _in_time(
        self, candidates: tuple[Candidate, ...], grant: _Grant, time: TimeBudget
    ) -> Iterator[Candidate]:
        """Candidates cut to what there is time for, up to the first that there is none for."""
        for candidate in candidates:
            seq = self._state.all.get(candidate.seq_id)
            if seq is None or seq.seq_id in grant.granted:
                continue
            waits = seq.status is SequenceStatus.WAITING
            start = self._cache.match(seq) if waits else seq.computed
            wanted = min(len(seq.tokens) - start, grant.tokens_left)
            if candidate.max_tokens is not None:
                wanted = min(wanted, candidate.max_tokens)
            if wanted > 0:
                choices = 1 + len(self._state.forks.get(seq.seq_id, ()))
                wanted = time.rows(seq, start, chunk_limit(seq, wanted), choices)
                if wanted == 0:
                    return
            count = len(grant.spans)
            yield Candidate(seq.seq_id, wanted, candidate.may_preempt)
            time.take(grant.spans[count:])

    def _slices_in_time(self, owed: list[BackwardSlice], time: TimeBudget) -> list[BackwardSlice]:
        """Slices in order, the last one cut to the layers that there is time for."""
        granted: list[BackwardSlice] = []
        for piece in owed:
            backward = self._learning.backward_of(piece.micro_batch)
            assert backward is not None, "what owes layers is open"
            layers = time.take_layers(backward, piece.hi - piece.lo)
            if layers:
                granted.append(replace(piece, lo=piece.hi - layers))
            if layers < piece.hi - piece.lo:
                break
        return granted

    def _grant_all(self, candidates: Iterable[Candidate], grant: _Grant, now: float) -> None:
        """Give candidates what they may have, in order, up to the budgets."""
        known, cache, max_spans = self._state.all, self._cache, self._budgets.max_sequences
        spans, granted = grant.spans, grant.granted
        for candidate in candidates:
            if grant.tokens_left <= 0 or len(spans) >= max_spans:
                return
            seq = known.get(candidate.seq_id)
            if seq is None or seq.seq_id in granted:
                continue
            span = _try_decode(seq, cache) if candidate.max_tokens != 0 else None
            if span is not None:
                spans.append(span)
                granted.add(seq.seq_id)
                grant.tokens_left -= 1
            elif not self._grant(seq, candidate, grant, now):
                return

    def _grant(self, seq: Sequence, candidate: Candidate, grant: _Grant, now: float) -> bool:
        """Give a candidate what it may have; False if no later one may be served either."""
        if seq.status is SequenceStatus.WAITING:
            if seq.scoring is not None and not self._may_record(seq, grant):
                return True
            if not self._start(seq, candidate, grant, now):
                return False
        wanted = min(len(seq.tokens) - seq.computed, grant.tokens_left)
        if candidate.max_tokens is not None:
            wanted = min(wanted, candidate.max_tokens)
        if seq.scoring is not None:
            wanted = chunk_limit(seq, wanted)
        if wanted <= 0:
            return True
        tokens = self._extend(seq, wanted, candidate, grant)
        if tokens == 0:  # without room for one token, what it holds is of more use to others
            self._preempt(seq)
            return False
        if seq.scoring is not None:
            grant.spans.append(scoring_span(seq, tokens, self._cache))
        else:
            forks = self._state.forks.get(seq.seq_id, [])
            grant.spans.append(_span(seq, tokens, forks, self._cache))
        grant.granted.add(seq.seq_id)
        grant.tokens_left -= tokens
        return True

    def _may_record(self, seq: Sequence, grant: _Grant) -> bool:
        """Whether learning lets a waiting sequence start, its recording included."""
        if self._learning.opens(seq) and grant.recordings_full:
            return False
        if self._learning.may_start(seq):
            return True
        grant.recordings_full |= self._learning.opens(seq)
        return False

    def _start(self, seq: Sequence, candidate: Candidate, grant: _Grant, now: float) -> bool:
        """Make a waiting sequence a running one, preempting victims if need be and allowed.

        Beside others it starts only if its whole prefix fits and each of them can still grow by
        a block: half-computed prompts that wait for each other's blocks help nobody.
        """
        while len(self._state.running) >= self._budgets.max_sequences:
            if not (candidate.may_preempt and self._preempt_for(seq, grant)):
                return False
        seq.computed = self._cache.attach(seq)
        while self._state.running:
            reserve = len(self._state.running)
            missing = self._cache.missing_blocks(seq, seq.remaining)
            if missing + reserve <= self._cache.available_blocks:
                break
            if not (candidate.may_preempt and self._preempt_for(seq, grant)):
                self._cache.release(seq)
                seq.computed = 0
                self._cache.add_reader(seq)
                return False
        self._cache.count_lookup(seq, seq.computed)
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = now
            seq.cached_tokens = seq.computed
        self._state.run(seq)
        if seq.scoring is not None:
            grant.opens += self._learning.started(seq, now)
        return True

    def _extend(self, seq: Sequence, wanted: int, candidate: Candidate, grant: _Grant) -> int:
        """Blocks for up to `wanted` tokens: all, else what victims give, else what there is."""
        while (copies := self._cache.try_extend(seq, wanted)) is None:
            if candidate.may_preempt and self._preempt_for(seq, grant):
                continue
            wanted = min(wanted, self._cache.fitting_tokens(seq))
            if wanted <= 0:
                return 0
        grant.copies.extend(copies)
        return wanted

    def _preempt_for(self, seq: Sequence, grant: _Grant) -> bool:
        """Preempt the next victim that is not `seq` and was not granted in this iteration."""
        while grant.victims:
            victim = self._state.running.get(grant.victims.pop())
            if victim is None or victim.seq_id in grant.granted:
                continue
            if victim is seq:
                grant.victims.clear()  # the rest has precedence over it
                return False
            self._preempt(victim)
            return True
        return False

    def _preempt(self, seq: Sequence) -> None:
        self._cache.release(seq)
        seq.computed, seq.mixed = 0, False
        seq.preemptions += 1
        if seq.scoring is not None:
            self._learning.preempted(seq)
        else:
            self.preemptions += 1
        self._state.wait(seq)
        self._cache.add_reader(seq)


def _span(seq: Sequence, num_tokens: int, forks: list[Sequence], cache: KVCache) -> Span:
    start, end, tokens = seq.computed, seq.computed + num_tokens, seq.tokens
    top = seq.request.sampling.prompt_logprobs
    targets: tuple[int, ...] = ()
    if top is not None and seq.scored < seq.prompt_tokens:
        targets = tuple(tokens[start + 1 : min(end + 1, seq.prompt_tokens)])
    return Span(
        seq.seq_id,
        start,
        tuple(tokens[start:end]),
        cache.table(seq, end),
        seq.adapter.content_hash if seq.adapter is not None else None,
        tuple([_draw(choice) for choice in (seq, *forks)]) if end == len(tokens) else (),
        targets,
        top or 0,
    )


def _try_decode(seq: Sequence, cache: KVCache) -> Span | None:
    """The last token of a running sequence whose prompt, forks and scores are done with, if it has
    its place or a block is to be had for it: the usual case."""
    start, tokens, prompt_tokens = seq.computed, seq.tokens, seq.prompt_tokens
    if len(tokens) - start != 1 or start < prompt_tokens or seq.scoring is not None:
        return None
    blocks = cache.try_slot(seq)
    if blocks is None:
        return None
    seq_id, adapter = seq.seq_id, seq.adapter
    position, sampling = start + 1 - prompt_tokens, seq.request.sampling
    if seq.needs_history or position < sampling.min_tokens:
        draw = _draw(seq)
    else:  # as `_draw` makes it, without its call
        draw = Draw(seq_id, seq.index, position, sampling, prompt_tokens)
    key = adapter.content_hash if adapter is not None else None
    return Span(seq_id, start, (tokens[-1],), blocks, key, (draw,))


def _draw(seq: Sequence) -> Draw:
    sampling, position = seq.request.sampling, seq.output_tokens
    return Draw(
        seq.seq_id,
        seq.index,
        position,
        sampling,
        seq.prompt_tokens,
        tuple(seq.tokens) if seq.needs_history else (),
        tuple(sorted(seq.stop_ids)) if position < sampling.min_tokens else (),
    )
