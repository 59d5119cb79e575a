"""When the next tokens of online requests are due, and which deadlines have moved.

Knows times and tokens only, and chooses nothing. Invariant: no deadline lies before the time at
which it was last asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.scheduling.view import View

# Of the objective: what is aimed at exactly is missed every other time.
_AIM = 0.9
# Tokens that an answer may lie behind: with none, whoever got its first token last leaves nobody
# any slack for a while, however far ahead the others are.
_BEHIND = 1
# Seconds for which the tightest objective that a request brought counts for those to come.
_REMEMBERED_S = 60.0


class Deadlines:
    """The first token is due at arrival + TTFT, token i at (i + 1) * 0.9 TPOT after the first one
    came, which is within the objective for answers of ten tokens and more.

    Echo (5.1) counts from when the first token was due; but what it came too early is no slack for
    the later ones, whose objective counts from then on. A missed deadline moves to a TPOT from now
    and takes the later ones along, so that a late request saves up slack again.
    """

    def __init__(self) -> None:
        self._from_s: dict[int, float] = {}  # of what has a token: the time to count from
        self._ttft_s = float("inf")  # the tightest seen, and when
        self._ttft_seen_s = float("-inf")

    def ttft_s(self, view: View) -> float:
        """What a request that comes next may ask for: the tightest TTFT objective among the default
        and those of the last minute."""
        if view.now - self._ttft_seen_s > _REMEMBERED_S:
            return view.default_slo.ttft_s
        return min(self._ttft_s, view.default_slo.ttft_s)

    def slack_s(self, view: View, sequences: Iterable[Sequence]) -> float:
        """Seconds until the first of the sequences' next tokens is due; infinity without one.

        What needs several iterations has its share of the slack in each.
        """
        now, most_tokens, online = view.now, view.budgets.max_batch_tokens, WorkClass.ONLINE
        counted, default, least_s = self._from_s, view.default_slo, float("inf")
        for seq in sequences:
            request = seq.request
            if request.work_class is not online:
                continue
            slo, length = request.slo or default, len(seq.tokens)
            tokens, tpot_s = length - len(request.prompt), _AIM * slo.tpot_s
            if tokens:
                since = counted.get(seq.seq_id)
                if since is None:
                    self._remember(slo.ttft_s, now)
                    since = counted[seq.seq_id] = now - (tokens - 1) * tpot_s
                slack_s = since + (tokens + _BEHIND) * tpot_s - now
                if slack_s < 0.0:
                    counted[seq.seq_id] = now - (tokens + _BEHIND - 1) * tpot_s
                    slack_s = tpot_s
            else:
                self._remember(slo.ttft_s, now)
                slack_s = request.arrival_s + slo.ttft_s - now
                if slack_s < 0.0:
                    slack_s = tpot_s
            left = length - seq.computed
            if left > most_tokens:
                slack_s /= -(-left // most_tokens)
            if slack_s < least_s:
                least_s = slack_s
        return least_s

    def _remember(self, ttft_s: float, now: float) -> None:
        if ttft_s <= self._ttft_s or now - self._ttft_seen_s > _REMEMBERED_S:
            self._ttft_s, self._ttft_seen_s = ttft_s, now

    def forget_ended(self, view: View) -> None:
        """Drop what is known of sequences that are gone, once it is much."""
        if len(self._from_s) > 2 * view.budgets.max_sequences:
            alive = {seq.seq_id for seq in (*view.serving, *view.waiting)}
            self._from_s = {key: value for key, value in self._from_s.items() if key in alive}
