"""Turns a policy's decision into a plan that exceeds no budget.

This is the only place where a decision meets blocks, tokens, sequence slots, recording rows and the
policy's time budget. Admission attaches, extends and preempts sequences, but chooses nothing: order
and victims come from the decision. Invariant: a plan has at most `max_batch_tokens` rows and
`max_sequences` spans. Every row has a block, and every recorded row has a place.
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
    """What one iteration has granted so far."""

    tokens_left: int
    victims: list[int]  # seq ids; the next victim is the last entry
    spans: list[Span] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    granted: set[int] = field(default_factory=set)  # seq ids, over all lanes
    opens: list[OpenMicroBatch] = field(default_factory=list)
    # Set once a recording did not fit. No other recording opens then: small ones would starve it.
    recordings_full: bool = False


class Admission:
    """Grants candidates in order. Changes state and cache. Called once per iteration."""

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
        granted: set[int] = set()  # shared by all lanes: nothing runs twice
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
                        wish.preemptible and not any(span.draws for span in grant.spans),
                    )
                )
                discards = ()
        if decision.evict:
            self._cache.evict_first(())
        return StepPlan(step, tuple(lanes)) if lanes else None

    def _grant_slices(
        self, wishes: tuple[SliceCandidate, ...], grant: _Grant, time: TimeBudget | None
    ) -> tuple[tuple[BackwardSlice, ...], tuple[Update, ...]]:
        """Backward slices of steps, and updates of the steps that have no other work left."""
        slices: list[BackwardSlice] = []
        updates: list[Update] = []
        ending: set[int] = set()
        if wishes and self._learning.scores.sequences:  # only a score can delay an update
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
        """Yield candidates, each cut to the rows that there is time for, until one gets none."""
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
        """Slices in order. The last one is cut to the layers that there is time for."""
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
        """Grant candidates in order until a budget is used up."""
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
        """Grant what fits of a candidate. False: no later candidate may be granted anything."""
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
        if tokens == 0:  # no block for one token: others can use its blocks
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
        """Whether a waiting sequence may start. Its recording has to fit if it opens one."""
        if self._learning.opens(seq) and grant.recordings_full:
            return False
        if self._learning.may_start(seq):
            return True
        grant.recordings_full |= self._learning.opens(seq)
        return False

    def _start(self, seq: Sequence, candidate: Candidate, grant: _Grant, now: float) -> bool:
        """Start a waiting sequence. Preempts victims if that is needed and allowed.

        Beside running sequences it starts only if all its tokens fit and each running sequence can
        still grow by one block. Otherwise half-computed prompts would wait for each other's blocks.
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
                self._cache.release(seq, used=False)
                seq.computed = 0
                self._cache.add_reader(seq)
                return False
        self._cache.counters.count_lookup(seq, seq.computed)
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = now
            seq.cached_tokens = seq.computed
        self._state.run(seq)
        if seq.scoring is not None:
            grant.opens += self._learning.started(seq, now)
        return True

    def _extend(self, seq: Sequence, wanted: int, candidate: Candidate, grant: _Grant) -> int:
        """Get blocks for up to `wanted` tokens, preempting victims if allowed; how many fit."""
        while (copies := self._cache.try_extend(seq, wanted)) is None:
            if candidate.may_preempt and self._preempt_for(seq, grant):
                continue
            wanted = min(wanted, self._cache.fitting_tokens(seq))
            if wanted <= 0:
                return 0
        grant.copies.extend(copies)
        return wanted

    def _preempt_for(self, seq: Sequence, grant: _Grant) -> bool:
        """Preempt the next victim other than `seq` that was granted nothing in this iteration."""
        while grant.victims:
            victim = self._state.running.get(grant.victims.pop())
            if victim is None or victim.seq_id in grant.granted:
                continue
            if victim is seq:
                grant.victims.clear()  # the remaining victims rank above `seq`
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
    """The span of one decode, or None if this sequence is not the usual case: it runs, its prompt,
    forks and prompt scores are done, and it has or gets a block for its last token."""
    start, tokens, prompt_tokens = seq.computed, seq.tokens, seq.prompt_tokens
    if len(tokens) - start != 1 or start < prompt_tokens or seq.scoring is not None:
        return None
    blocks = cache.try_slot(seq, start)
    if blocks is None:
        return None
    if seq.needs_history or start + 1 - prompt_tokens < seq.request.sampling.min_tokens:
        return _span(seq, 1, [], cache)
    return plain_decode(seq, start, tokens[-1], blocks)


def plain_decode(seq: Sequence, start: int, token: int, table: tuple[tuple[int, ...], ...]) -> Span:
    """A decode of `token` at `start`, whose draw needs no history and may take any token."""
    position, sampling = start + 1 - seq.prompt_tokens, seq.request.sampling
    draw = Draw(seq.seq_id, seq.index, position, sampling, seq.prompt_tokens)
    key = seq.adapter.content_hash if seq.adapter is not None else None
    return Span(seq.seq_id, start, (token,), table, key, (draw,))


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
        seq.request.wants_state and not position and not seq.index,
    )
