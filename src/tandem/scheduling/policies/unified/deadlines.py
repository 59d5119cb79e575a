"""When the next tokens of online requests are due, and which deadlines have moved.

Knows times and tokens only, and chooses nothing. Invariant: no deadline lies before the time at
which it was last read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.estimators.work import PassWork
from tandem.scheduling.view import View

# Bounds of `margin`: a missed deadline moves, but unused time is lost.
_LEAST_MARGIN, _MOST_MARGIN = 0.04, 0.2
# Longer answers may lag by one token: else one that has just got its first token would leave no
# slack, however far ahead the others are. Shorter ones cannot catch up.
_SHORT_TOKENS = 4
# Number of recent requests that predict how long the next ones can wait and how long their prompts
# take. Of every `_SPARED` of them, the one that could wait least, or took longest, is ignored.
_REMEMBERED = 64
_SPARED = 24


class Deadlines:
    """Deadlines of online requests, in seconds on the engine's clock.

    The first token is due at arrival + TTFT, token i after it at (i + 1) * P after the first token
    came (i * P in answers of at most four tokens); P is TPOT over `margin`. Echo (5.1) counts from
    the time at which the first token was due. But TPOT counts from the first token itself, so an
    early first token is no slack for later ones. A request behind its deadline has no slack. A
    request behind its objective has lost it: its deadline moves to P from now, and later deadlines
    move along, so that it can save up slack again.
    """

    def __init__(self) -> None:
        # Of a sequence with a token: its next token is due at the first number + the second, which
        # is P, times the length of prompt and answer.
        self._clocks: dict[int, tuple[float, float]] = {}
        # Of recent requests: computed and cached tokens of the prompt, and seconds that it could
        # have waited.
        self._prompts: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._waits_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._wait_s: float | None = None
        self._long = (0, 0)  # of the prompts, the one that the next may be as long as

    def wait_s(self, view: View) -> float:
        """Seconds that the next request may wait for its prompt to start: what recent requests
        could have waited, ignoring the few that could least. At first, the default objective."""
        return view.default_slo.ttft_s if self._wait_s is None else self._wait_s

    def prompt_s(self, view: View) -> float:
        """Seconds that the next prompt may add to a pass: the longest of the recent ones, ignoring
        few."""
        (computed, cached), work = self._long, PassWork()
        if not computed:
            return 0.0
        work.span(cached, computed, draws=1)
        return view.latency.added_s(work)

    def slack_s(self, view: View, sequences: Iterable[Sequence]) -> float:
        """Seconds until the first of the sequences' next tokens is due; infinity if there is none.

        A prompt that needs several iterations spreads its slack evenly over them.
        """
        now, most_tokens, clocks = view.now, view.budgets.max_batch_tokens, self._clocks
        least_s = math.inf
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
        """Slack of a sequence without a clock. Its clock starts with its first token."""
        slo, length = view.slo(seq), len(seq.tokens)
        tpot_s = slo.tpot_s / margin(view)
        if length > seq.prompt_tokens:
            if seq.index == 0:  # other choices have the same prompt
                self._remember(view, seq, slo.ttft_s)
            first_s = view.now if seq.first_token_s is None else seq.first_token_s
            clock = (first_s + (_lag(seq) - seq.prompt_tokens) * tpot_s, tpot_s)
            self._clocks[seq.seq_id] = clock
            slack_s = clock[0] + length * tpot_s - view.now
            return slack_s if slack_s >= 0.0 else self._behind_s(view, seq, clock)
        slack_s = seq.request.arrival_s + slo.ttft_s - view.now
        return slack_s if slack_s >= 0.0 else tpot_s

    def _behind_s(self, view: View, seq: Sequence, clock: tuple[float, float]) -> float:
        """Slack of a sequence behind its deadline: 0, or one token's time if the deadline moves."""
        base_s, tpot_s = clock
        first_s = base_s + (seq.prompt_tokens - _lag(seq)) * tpot_s
        counted = min(seq.output_tokens + 1, seq.request.sampling.max_tokens - 1)
        if first_s + counted * view.slo(seq).tpot_s >= view.now:
            return 0.0
        self._clocks[seq.seq_id] = (view.now + (1 - len(seq.tokens)) * tpot_s, tpot_s)
        return tpot_s

    def _remember(self, view: View, seq: Sequence, ttft_s: float) -> None:
        """Note how long a request could have waited. Ignores requests whose prompt alone takes
        longer than the objective."""
        work = PassWork()
        work.span(0, seq.prompt_tokens, draws=1)
        prompt_s = view.latency.forward_s(work)
        if prompt_s < ttft_s:
            self._prompts.append((seq.prompt_tokens - seq.cached_tokens, seq.cached_tokens))
            self._waits_s.append(ttft_s - prompt_s)
            ignored = len(self._waits_s) // _SPARED
            self._long = sorted(self._prompts)[-1 - ignored]
            self._wait_s = sorted(self._waits_s)[ignored]

    def forget_ended(self, view: View) -> None:
        """Drop the clocks of sequences that have ended, once there are many."""
        if len(self._clocks) > 2 * view.budgets.max_sequences:
            alive = {seq.seq_id for seq in (*view.serving, *view.waiting)}
            self._clocks = {key: value for key, value in self._clocks.items() if key in alive}


def margin(view: View) -> float:
    """What objectives are divided by: 1, and as much more as recent predictions were off. What is
    aimed at exactly is missed every other time."""
    return 1.0 + min(max(_LEAST_MARGIN, view.latency.uncertainty), _MOST_MARGIN)


def _lag(seq: Sequence) -> int:
    """Tokens that an answer may lag."""
    return int(seq.request.sampling.max_tokens > _SHORT_TOKENS)
