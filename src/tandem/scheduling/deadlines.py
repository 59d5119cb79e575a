"""When the next tokens of online requests are due (Echo 5.1), and which deadlines have moved.

Knows times and tokens only, and chooses nothing. Invariant: no deadline lies before the time at
which it was last asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.scheduling.view import View


class Deadlines:
    """Token i is due at arrival + TTFT + i * TPOT; a missed deadline moves to a TPOT from now and
    takes the later ones along, so that a late request saves up slack again."""

    def __init__(self) -> None:
        self._moved_s: dict[int, float] = {}

    def slack_s(self, view: View, sequences: Iterable[Sequence]) -> float:
        """Seconds until the first of the sequences' next tokens is due; infinity without one.

        What needs several iterations has its share of the slack in each.
        """
        now, most_tokens, online = view.now, view.budgets.max_batch_tokens, WorkClass.ONLINE
        moved, default, least_s = self._moved_s, view.default_slo, float("inf")
        for seq in sequences:
            request = seq.request
            if request.work_class is not online:
                continue
            slo, length = request.slo or default, len(seq.tokens)
            due_s = request.arrival_s + slo.ttft_s + (length - len(request.prompt)) * slo.tpot_s
            if seq.seq_id in moved:
                due_s += moved[seq.seq_id]
            if due_s < now:
                moved_s = now + slo.tpot_s - due_s
                moved[seq.seq_id] = moved.get(seq.seq_id, 0.0) + moved_s
                due_s = now + slo.tpot_s
            slack_s, left = due_s - now, length - seq.computed
            if left > most_tokens:
                slack_s /= -(-left // most_tokens)
            if slack_s < least_s:
                least_s = slack_s
        return least_s

    def forget_ended(self, view: View) -> None:
        """Drop what has moved of sequences that are gone, once it is much."""
        if len(self._moved_s) > 2 * view.budgets.max_sequences:
            alive = {seq.seq_id for seq in (*view.serving, *view.waiting)}
            self._moved_s = {key: value for key, value in self._moved_s.items() if key in alive}
