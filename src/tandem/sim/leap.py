"""Advances many iterations at once while only decodes run. Used by the simulator.

While no request ends or arrives, and the policy promises the same decision again, k iterations are
k tokens for each running sequence. Invariant: afterwards the scheduler's state and the estimators
are those of k single iterations, except for the numbers of new blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.events import TokenEvent
from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.estimators.work import PassWork
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.state import class_of


class Leaper:
    """Advances one scheduler, between two iterations."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def reach(self) -> int:
        """How many iterations can be advanced together now; 0 if none.

        The first sequence to end needs one more, so every end happens in an iteration of its own.
        """
        scheduler = self._scheduler
        if not scheduler.steady:
            return 0
        running = list(scheduler.state.running.values())
        if not running or len(running) > scheduler.budgets.max_sequences:
            return 0
        most = min(self._left(seq) for seq in running) - 1
        if most < 1:
            return 0
        return min(most, self._room(running))

    def _room(self, running: list[Sequence]) -> int:
        """Iterations for which there are blocks, evicting what single iterations would evict."""
        cache = self._scheduler.cache
        if any(cache.missing_blocks(seq, 0) for seq in running):
            return 0  # the first writer of a shared tail block copies it
        # A leap releases no sequence, so the number of new blocks decides which ones are evicted.
        # The exception: two sequences that fill equal blocks give one of them back.
        apart = cache.available_blocks > cache.free_blocks and cache.holders.grow_apart(running)
        spare = cache.available_blocks if apart else cache.free_blocks
        return spare // len(running) * cache.block_size

    def leap(
        self,
        most: int,
        seconds_of: Callable[[PassWork], float],
        until_s: float,
        now: float,
        token_of: Callable[[int, int], int],
        host_s: float = 0.0,
    ) -> tuple[list[TokenEvent], float, int]:
        """Advance up to `most` iterations, or until one ends at or after `until_s`. Returns the
        events, the time at the end, and the number of iterations.

        An iteration takes `seconds_of` its work plus `host_s`. `token_of(seq_id, position)` is the
        token that a sequence draws at an output position.
        """
        scheduler = self._scheduler
        running = list(scheduler.state.running.values())
        work = PassWork()
        for seq in running:
            work.decode(len(seq.tokens))
        made = 0
        online = [seq for seq in running if class_of(seq) is WorkClass.ONLINE]
        cache = scheduler.cache
        while made < most and (made == 0 or now < until_s):
            if scheduler.demand.due(now):
                if made and not cache.holders.grow_apart(running):
                    break  # two of the new blocks may be one
                grown = cache.holders.growth(online, made + 1)
                scheduler.demand.observe(now, cache.held_by_rank[0] + grown)
            seconds = seconds_of(work)
            scheduler.latency.observe_decodes(work, seconds)
            now += seconds
            now += host_s
            made += 1
            work.context += len(running)
            work.longest += 1
        events = [self._advance(seq, made, token_of) for seq in running]
        scheduler.progress.generation_tokens += made * len(running)
        return events, now, made

    def _left(self, seq: Sequence) -> int:
        """Least number of tokens that a sequence still draws; 1 if any token may end it."""
        sampling = seq.request.sampling
        if seq.stop_ids or sampling.has_penalties or not seq.decoding:
            return 1
        if seq.computed < seq.prompt_tokens:  # the first token is timed by a single iteration
            return 1
        room = self._scheduler.max_model_len - len(seq.tokens)
        return min(sampling.max_tokens - seq.output_tokens, room)

    def _advance(
        self, seq: Sequence, count: int, token_of: Callable[[int, int], int]
    ) -> TokenEvent:
        cache, position = self._scheduler.cache, seq.output_tokens
        copies = cache.try_extend(seq, count)
        assert copies == (), "a leap copies nothing"
        tokens = tuple([token_of(seq.seq_id, position + k) for k in range(count)])
        seq.tokens += tokens
        seq.computed += count
        cache.commit(seq)
        return TokenEvent(
            seq.request.request_id,
            seq.index,
            tokens,
            adapter=seq.adapter.label if seq.adapter is not None else None,
            cached_tokens=seq.cached_tokens,
        )
