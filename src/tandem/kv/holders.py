"""What running sequences hold: blocks of each, and which of them it holds alone.

Knows block tables and counts, no content. Relies on this: who holds a block of a table holds those
before it too, so the number of holders never rises along a table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tandem.core.sequence import Sequence
from tandem.kv.pool import BlockPool
from tandem.kv.tables import BlockTable


@dataclass(frozen=True, slots=True)
class Apart:
    """Blocks of some sequences, apart by whether one or several of them hold a block. Other
    sequences do not count."""

    leading: list[int]  # of each: its first blocks, which it shares with others of them
    own: list[int]  # of each: the blocks after these, which it holds alone
    shared: int  # blocks that at least two of them hold, each counted once
    ranks: int  # all running sequences of lower ranks (`Sequence.order`) are among them


class Holders:
    """Counts of one KV group. The cache changes the pool and the tables."""

    def __init__(self, pool: BlockPool, tables: Mapping[int, BlockTable], block_size: int) -> None:
        self._pool, self._tables, self._block_size = pool, tables, block_size

    def held_by(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that these sequences hold. A shared block counts once for each of them."""
        tables = [self._tables.get(seq.seq_id) for seq in sequences]
        return sum([len(table) for table in tables if table is not None])

    def growth(self, sequences: Iterable[Sequence], ahead: int) -> int:
        """Blocks that these running sequences will take for so many more tokens each."""
        size, tables = self._block_size, self._tables
        wanted = [(-(-(seq.computed + ahead) // size), tables[seq.seq_id]) for seq in sequences]
        return sum([max(0, blocks - len(table)) for blocks, table in wanted])

    def grow_apart(self, sequences: Iterable[Sequence]) -> bool:
        """Whether none of these will fill a block that is cached or that another of them fills too.

        If so, the order in which they take blocks does not matter.
        """
        ends = [self._tables[seq.seq_id].last_node for seq in sequences]
        return len(set(ends)) == len(ends) and not any(node.cached_children for node in ends)

    def apart(self, sequences: Iterable[Sequence]) -> Apart:
        """Blocks of these sequences; one that does not run has none. Cheap for all running ones of
        the first classes; of those of other classes, each block is read."""
        pool, found = self._pool, [self._tables.get(seq.seq_id) for seq in sequences]
        tables = [table for table in found if table is not None]
        counted = Counter([table.rank for table in tables])
        running = Counter([table.rank for table in self._tables.values()])
        ranks = 0
        while ranks < len(pool.held_by_rank) and counted[ranks] == running[ranks]:
            ranks += 1
        extra = Counter(
            [block for table in tables if table.rank >= ranks for block in table.groups[0]]
        )

        def alone(block: int) -> bool:
            return pool.count_below(block, ranks) + extra[block] < 2

        leading, own = list[int](), list[int]()
        for each in found:
            blocks = each.groups[0] if each is not None else []
            if not blocks or pool.count(blocks[0]) == 1:  # the usual case
                first = 0
            else:
                first = bisect_left(blocks, True, key=alone)
            leading.append(first)
            own.append(len(blocks) - first)
        beside = sum(1 for block in extra if not pool.count_below(block, ranks))
        total = sum(pool.held_by_rank[:ranks]) + beside
        return Apart(leading, own, total - sum(own), ranks)
