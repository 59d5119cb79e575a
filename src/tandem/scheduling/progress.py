"""Advances sequences by what a plan computed, and ends them.

Takes results and returns events. Knows no policy and makes no plan. Invariant: a sequence that has
ended is released once no plan in flight has it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.core.events import RequestTimes, TokenEvent
from tandem.core.plan import DrawResult, ScoreResult, Span
from tandem.core.sequence import FinishReason, Sequence, SequenceStatus
from tandem.kv.cache import KVCache
from tandem.scheduling.flight import Flight
from tandem.scheduling.limits import ends_at
from tandem.scheduling.state import SchedulerState


class Progress:
    """Of the requests of one scheduler. `requests` has the choices that are not released, by
    request id. `prompt_tokens` and `generation_tokens` are totals since the start."""

    def __init__(
        self,
        state: SchedulerState,
        cache: KVCache,
        flight: Flight,
        *,
        max_sequences: int,
        max_model_len: int,
    ) -> None:
        self.requests: dict[str, list[Sequence]] = {}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._state, self._cache, self._flight = state, cache, flight
        self._max_sequences, self._max_model_len = max_sequences, max_model_len
        self._ended: list[tuple[Sequence, FinishReason]] = []

    def advance(
        self,
        seq: Sequence,
        span: Span,
        score: ScoreResult | None,
        draws: Mapping[int, DrawResult],
        failed: Mapping[int, str],
        now: float,
        events: list[TokenEvent],
    ) -> None:
        """Apply the result of one span; appends the events to deliver to `events`."""
        if seq.seq_id in failed:
            gone = [seq, *self._state.take_forks(seq)]
            events.extend(self._fail(gone, failed[seq.seq_id], now))
            return
        seq.computed = span.start + len(span.tokens)
        self._cache.commit(seq)
        if score is not None:
            events.extend(self._take_scores(seq, span, score))
        if not span.draws:
            return
        forks = self._start_forks(seq) if seq.seq_id in self._state.forks else ()
        for choice in (seq, *forks):
            if choice.seq_id in failed:
                events.extend(self._fail([choice], failed[choice.seq_id], now))
            elif choice.seq_id in draws:
                events.append(self._take_token(choice, draws[choice.seq_id], now))

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence. Idempotent. It is released now, or after the plan in flight that has
        it."""
        if seq.status is SequenceStatus.FINISHED:
            return
        seq.status = SequenceStatus.FINISHED
        if self._flight.holds(seq):
            self._ended.append((seq, reason))
        else:
            self._release(seq, reason)

    def release_ended(self) -> None:
        """A plan has landed: release the sequences that ended while it was in flight."""
        ended, self._ended = self._ended, []
        for seq, reason in ended:
            self._release(seq, reason)

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
        forks = self._state.take_forks(seq)
        for child in forks:
            child.first_scheduled_s = seq.first_scheduled_s
            child.cached_tokens = seq.cached_tokens
            child.scored = seq.scored
            if len(self._state.running) < self._max_sequences:
                child.computed, child.mixed = seq.computed, seq.mixed
                self._cache.fork(seq, child)
                self._state.run_fork(child)
            else:
                self._state.wait_fork(child)
        return forks

    def _take_token(self, seq: Sequence, draw: DrawResult, now: float) -> TokenEvent:
        waiting = seq.status is SequenceStatus.WAITING
        seq.tokens.append(draw.token)
        if waiting:
            self._state.grow(seq)
        seq.redrawn = draw.redrawn
        if draw.redrawn:
            self._flight.leave_out(seq)
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
        reason = self._reason_to_end(seq, draw.token)
        if reason is not None:
            event.finish_reason = reason
            event.stop_token = draw.token if reason is FinishReason.STOP else None
            event.times = RequestTimes.of(seq, now)
            self.finish(seq, reason)
        elif waiting:
            self._cache.add_reader(seq)
        return event

    def _reason_to_end(self, seq: Sequence, token: int) -> FinishReason | None:
        sampling, length = seq.request.sampling, len(seq.tokens)
        made = length - seq.prompt_tokens
        # A grammar lets an early end be drawn only where nothing else can follow.
        if token in seq.stop_ids and (made > sampling.min_tokens or sampling.grammar is not None):
            return FinishReason.STOP
        return FinishReason.LENGTH if ends_at(seq, length, self._max_model_len) else None

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
            self.finish(seq, FinishReason.ERROR)
        return events

    def _release(self, seq: Sequence, reason: FinishReason) -> None:
        self._promote_fork(seq)
        self._cache.remove_reader(seq)
        if self._cache.holds(seq):
            self._cache.release(seq, discard=reason is FinishReason.ERROR)
        if seq.seq_id in self._state.all:
            self._state.remove(seq)
        choices = self.requests[seq.request.request_id]
        choices.remove(seq)
        if not choices:
            del self.requests[seq.request.request_id]

    def _promote_fork(self, seq: Sequence) -> None:
        """If choice 0 ends before its siblings share the prompt, the next choice computes it."""
        forks = self._state.take_forks(seq)
        if not forks:
            return
        heir, *others = forks
        heir.scored = seq.scored
        self._state.wait_fork(heir)
        self._cache.add_reader(heir)
        for sibling in others:
            self._state.add_fork(heir, sibling)
