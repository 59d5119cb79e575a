"""How much work of one lane fits into a policy's time budget, by predicted time.

Counts what was granted and predicts further work; grants nothing itself. Invariant: the granted
work is predicted to fit the budget, unless it is a single smallest piece.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.plan import Span
from tandem.core.sequence import Sequence
from tandem.estimators.latency import LatencyModel
from tandem.estimators.work import BackwardWork, PassWork


class TimeBudget:
    """The time budget of one iteration.

    The smallest piece is `least_rows` rows of a prompt or a training forward, one layer, or an
    update.
    """

    def __init__(self, seconds: float, latency: LatencyModel, least_rows: int) -> None:
        self._seconds, self._latency, self._least_rows = seconds, latency, least_rows
        self._work = PassWork()
        self._pass_s = 0.0
        self._after_s = 0.0

    def rows(self, seq: Sequence, start: int, most: int, choices: int) -> int:
        """How many of `most` rows (above 0) from position `start` on there is time for.

        `choices` tokens are drawn from the last row of the sequence.
        """
        if self._fits(seq, start, most, choices):
            return most
        fits, fails = 0, most
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self._fits(seq, start, middle, choices):
                fits = middle
            else:
                fails = middle
        return fits if self._work.tokens else max(fits, min(most, self._least_rows))

    def take(self, spans: Iterable[Span]) -> None:
        """Count spans that were granted."""
        self._work.add(spans)
        self._pass_s = self._forward_s(self._work)

    def take_layers(self, backward: BackwardWork, most: int) -> int:
        """How many of `most` layers of a recording there is time for. Counts them as granted."""
        layers = min(most, self._latency.layers_within(backward, self._left_s))
        layers = layers or int(self._nothing)
        if layers:
            self._after_s += self._latency.slice_s(backward, layers)
        return layers

    def take_update(self) -> bool:
        """Whether there is time for an update. Counts it as granted."""
        seconds = self._latency.update_s()
        if seconds > self._left_s and not self._nothing:
            return False
        self._after_s += seconds
        return True

    @property
    def _left_s(self) -> float:
        return self._seconds - self._pass_s - self._after_s

    @property
    def _nothing(self) -> bool:
        """Whether nothing was granted so far."""
        return not self._work.tokens and self._after_s == 0.0

    def _fits(self, seq: Sequence, start: int, rows: int, choices: int) -> bool:
        """Whether the pass stays within the budget with `rows` more rows of a sequence."""
        work, end = self._work.copy(), start + rows
        scoring, draws, scored, recorded = seq.scoring, 0, 0, 0
        if scoring is not None:
            scored = max(0, end - max(start, seq.scored - 1))
            recorded = rows if scoring.record is not None and start >= scoring.recorded else 0
        else:
            draws = choices if end == len(seq.tokens) else 0
            if seq.request.sampling.prompt_logprobs is not None and seq.scored < seq.prompt_tokens:
                scored = max(0, min(end, seq.prompt_tokens - 1) - start)
        if rows == 1 and draws and not scored:
            work.decode(end)
            work.draws += draws - 1
        else:
            work.span(start, rows, draws=draws, scored=scored, recorded=recorded)
        return self._forward_s(work) <= self._seconds

    def _forward_s(self, work: PassWork) -> float:
        """An upper bound: a pass that only records is taken to record whole micro-batches."""
        work.whole = 0 < work.recorded == work.tokens
        return self._latency.forward_s(work)
