"""When the next tokens of online requests are due, and which deadlines have moved.

Knows times and tokens only, and chooses nothing. Invariant: no deadline lies before the time at
which it was last asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.estimators.work import PassWork
from tandem.scheduling.view import View

# Of the objective: what is aimed at exactly is missed every other time, and requests that come
# while an answer is on its way slow it down.
_AIM = 0.8
# Tokens that an answer may lie behind: with none, whoever got its first token last leaves nobody
# any slack for a while, however far ahead the others are. Answers that cannot make it good again
# may not: those of up to so many tokens.
_BEHIND = 1
_SHORT_TOKENS = 4
# Requests that say what those to come can wait; of 24 the one with the least slack does not count.
_REMEMBERED = 64
_SPARED = 24
# An answer that is behind its objective after so many tokens is late; before, it may well catch up.
_LATE_TOKENS = 32


class Deadlines:
    """The first token is due at arrival + TTFT, token i at (i + 1) * 0.8 TPOT after the first one
    came, which is within the objective for answers of five tokens and more; shorter ones, by their
    `max_tokens`, at i * 0.8 TPOT.

    Echo (5.1) counts from when the first token was due; but what it came too early is no slack for
    the later ones, whose objective counts from then on. Who is behind has no slack; who is behind
    the objective too has lost it: the deadline moves to 0.8 TPOT from now and takes the later ones
    along, so that a late request saves up slack again.

    `ease` is the share of their TTFT objective that the last requests had left when their first
    token came, but for the few with the least: near 1 while they are served at once, 0 if late.
    Whose answer is late further on counts once more, as late.
    """

    def __init__(self) -> None:
        # Of what has a token: the next one is due at the first number + the second, 0.8 TPOT, times
        # the length of prompt and answer.
        self._clocks: dict[int, tuple[float, float]] = {}
        self._slacks_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._wait_s: float | None = None
        self._left: deque[float] = deque(maxlen=_REMEMBERED)
        self._late: set[int] = set()  # answers whose deadline has moved
        self.ease = 1.0

    def wait_s(self, view: View) -> float:
        """How long a request that comes next may wait for its prompt's turn: what the last ones
        could have waited, but for the few with the least slack; at first the default objective."""
        return view.default_slo.ttft_s if self._wait_s is None else self._wait_s

    def slack_s(self, view: View, sequences: Iterable[Sequence]) -> float:
        """Seconds until the first of the sequences' next tokens is due; infinity without one.

        What needs several iterations has its share of the slack in each.
        """
        now, most_tokens, clocks = view.now, view.budgets.max_batch_tokens, self._clocks
        least_s = float("inf")
        for seq in sequences:
            length, clock = len(seq.tokens), clocks.get(seq.seq_id)
            if clock is not None:
                slack_s = clock[0] + length * clock[1] - now
                if slack_s < 0.0:
                    slack_s = self._behind_s(view, seq, clock)
            elif seq.request.work_class is WorkClass.ONLINE:
                slack_s = self._begin_s(view, seq)
            else:
                continue
            if length > most_tokens and length - seq.computed > most_tokens:
                slack_s /= -(-(length - seq.computed) // most_tokens)
            if slack_s < least_s:
                least_s = slack_s
        return least_s

    def _begin_s(self, view: View, seq: Sequence) -> float:
        """Slack of a sequence that has no clock; it gets one with its first token."""
        request, length = seq.request, len(seq.tokens)
        slo = request.slo or view.default_slo
        tpot_s = _AIM * slo.tpot_s
        if length > seq.prompt_tokens:
            self._remember(view, seq, slo.ttft_s)
            first_s = view.now if seq.first_token_s is None else seq.first_token_s
            clock = (first_s + (_allowance(seq) - seq.prompt_tokens) * tpot_s, tpot_s)
            self._clocks[seq.seq_id] = clock
            slack_s = clock[0] + length * tpot_s - view.now
            return slack_s if slack_s >= 0.0 else self._behind_s(view, seq, clock)
        slack_s = request.arrival_s + slo.ttft_s - view.now
        return slack_s if slack_s >= 0.0 else tpot_s

    def _behind_s(self, view: View, seq: Sequence, clock: tuple[float, float]) -> float:
        """Slack of a sequence that is behind: none, or a token's if its deadline has to move."""
        base_s, tpot_s = clock
        request, length = seq.request, len(seq.tokens)
        slo = request.slo or view.default_slo
        first_s = base_s + (seq.prompt_tokens - _allowance(seq)) * tpot_s
        counted = min(seq.output_tokens + _BEHIND, request.sampling.max_tokens - 1)
        if first_s + counted * slo.tpot_s >= view.now:
            return 0.0
        self._clocks[seq.seq_id] = (view.now + (1 - length) * tpot_s, tpot_s)
        if seq.output_tokens >= _LATE_TOKENS and seq.seq_id not in self._late:
            self._late.add(seq.seq_id)
            self._note(0.0)
        return tpot_s

    def _remember(self, view: View, seq: Sequence, ttft_s: float) -> None:
        """Note what a request could have waited, and what share of its objective was left when its
        first token came, unless its prompt takes too long by itself."""
        work = PassWork()
        work.span(0, seq.prompt_tokens, draws=1)
        slack_s = ttft_s - view.latency.forward_s(work)
        if slack_s > 0.0:
            left_s = seq.request.arrival_s + ttft_s - (seq.first_token_s or view.now)
            self._note(max(0.0, left_s / ttft_s))
            self._slacks_s.append(slack_s)
            self._wait_s = sorted(self._slacks_s)[len(self._slacks_s) // _SPARED]

    def _note(self, left: float) -> None:
        """So much of its objective was left when a request got a token."""
        self._left.append(left)
        self.ease = sorted(self._left)[len(self._left) // _SPARED]

    def forget_ended(self, view: View) -> None:
        """Drop what is known of sequences that are gone, once it is much."""
        if len(self._clocks) > 2 * view.budgets.max_sequences:
            alive = {seq.seq_id for seq in (*view.serving, *view.waiting)}
            self._clocks = {key: value for key, value in self._clocks.items() if key in alive}
            self._late &= alive


def _allowance(seq: Sequence) -> int:
    """Tokens that an answer may lie behind."""
    return _BEHIND if seq.request.sampling.max_tokens > _SHORT_TOKENS else 0
