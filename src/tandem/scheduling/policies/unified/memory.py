"""Whether waiting requests will find KV memory: by the predicted peak of all that run with them.

Running sequences grow by a token an iteration and free their blocks when they end, so what counts
is the largest sum at any time from now on, not the sum of what each has at its end. Reads the view,
changes nothing. Invariant: as long as no sequence is counted, every request fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.core.lengths import Forecast
from tandem.core.sequence import Sequence
from tandem.estimators.memory import Growing, Peak, Table, table_of
from tandem.scheduling.view import View

# After so many requests that do not fit, one hardly finds another that does.
_MOST_REFUSED = 4
# Tables of this many sequences are remembered; then all are made again.
_MOST_TABLES = 4096


@dataclass(frozen=True, slots=True)
class _Known:
    length: Forecast
    until: float  # the table is right for answers with fewer tokens
    table: Table


class EndTables:
    """At which lengths the answers of sequences may end. A table changes only with the forecast,
    and when an answer passes one of the forecast's quantiles."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(self, seq: Sequence, length: Forecast) -> Table:
        """The table of a sequence with this forecast."""
        made, known = seq.output_tokens, self._known.get(seq.seq_id)
        if known is None or known.length is not length or made >= known.until:
            if len(self._known) >= _MOST_TABLES:
                self._known.clear()
            until = next((each for each in length.tokens if each > made), made + 1.0)
            known = self._known[seq.seq_id] = _Known(length, until, table_of(length.ends(made)))
        return known.table


class PeakMemory:
    """What `running` sequences, and those that are counted with them, will need, of all blocks but
    `reserved` ones and those of `protected` sequences.

    A sequence counts with what no other of these holds; what several hold stays. All that others
    hold is preempted or evicted for them. An answer of unknown length counts with what it holds
    now.
    """

    def __init__(
        self,
        view: View,
        tables: EndTables,
        running: list[Sequence],
        protected: Iterable[Sequence] = (),
        reserved: float = 0.0,
    ) -> None:
        apart = view.kv.blocks_apart([*running, *protected])
        stay = apart.shared + sum(apart.own[len(running) :])
        self._view, self._tables, self._ranks = view, tables, apart.ranks
        self._room = (view.kv.num_blocks - stay - reserved) * view.kv.block_size
        self._counted = [
            each
            for seq, leading in zip(running, apart.leading, strict=False)
            for each in self._growing(seq, leading)
        ]
        self._most_tokens = sum([each.most for each in self._counted])
        self._peak: Peak | None = None  # of those that are counted; made when it is needed
        self._refused: list[tuple[float, float]] = []  # tokens now and at most

    @property
    def exhausted(self) -> bool:
        """Whether so many did not fit that others need not be tried."""
        return len(self._refused) >= _MOST_REFUSED

    def try_count(self, seq: Sequence, *, needed: bool = False) -> bool:
        """Count a waiting sequence from now on, if it fits or is `needed`; whether it is counted.

        One that needs as much as one that did not fit, now and at most, does not fit.
        """
        view, tokens = self._view, len(seq.tokens)
        blocks = -(-tokens // view.kv.block_size)
        more = self._growing(seq, blocks - view.kv.new_blocks(seq, tokens, self._ranks))
        now, most = sum([each.now for each in more]), sum([each.most for each in more])
        if not (needed or not self._counted or self._fits(more, now, most)):
            self._refused.append((now, most))
            return False
        self._counted += more
        self._most_tokens += most
        if self._peak is not None:
            self._peak.add(more)
        return True

    def _fits(self, more: list[Growing], now: float, most: float) -> bool:
        if self._most_tokens + most <= self._room:  # the usual case is quickly found
            return True
        if any(now >= each_now and most >= each_most for each_now, each_most in self._refused):
            return False
        if self._peak is None:
            self._peak = Peak(self._counted)
        return self._peak.tokens_with(more) <= self._room

    def _growing(self, seq: Sequence, leading: int) -> list[Growing]:
        """A sequence whose first `leading` blocks others hold too, and the choices that will share
        its prompt."""
        size, made, length = self._view.kv.block_size, seq.output_tokens, seq.request.length
        own = max(0, len(seq.tokens) - size * leading)
        if length is None:
            return [Growing(size * -(-own // size))]
        table = self._tables.of(seq, length)
        unfilled = (size - 1) / 2  # of the last block, on average
        found = [Growing(own + unfilled, made, table)]
        if not made:
            found += [Growing(unfilled, made, table)] * (seq.request.n - seq.index - 1)
        return found
