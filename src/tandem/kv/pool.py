"""Reference-counted blocks of one KV group.

Knows numbers only: neither what a block contains nor who holds it, but for the holder's rank
(`Sequence.order`: online, offline, learning). Invariant: a block is in exactly one state: free,
held (count > 0), or idle (count 0, but its content is still cached).
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.errors import AccountingError
from tandem.core.slo import WorkClass

_RANKS = range(len(WorkClass))


class BlockPool:
    """`num_blocks` blocks, numbered from 0.

    | state | count | who may take it |
    |---|---|---|
    | free | 0 | `allocate` |
    | held | > 0 | no one |
    | idle | 0 | `retain` (its content is reused) or `reclaim` (it is evicted) |

    `held_by_rank` are the held blocks by the lowest rank of their holders.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._of_rank = [[0] * num_blocks for _ in _RANKS]
        self.held_by_rank = [0 for _ in _RANKS]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Blocks without a holder whose content is cached."""
        return len(self._idle)

    @property
    def held(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - len(self._free) - len(self._idle)

    def count(self, block: int) -> int:
        """Number of holders of `block`."""
        return self._counts[block]

    def count_below(self, block: int, ranks: int) -> int:
        """Number of holders of `block` whose rank is below `ranks`."""
        return sum([counts[block] for counts in self._of_rank[:ranks]])

    def allocate(self, rank: int) -> int:
        """Take a free block with one holder. The caller made sure that one is free."""
        block = self._free.pop()
        assert self._counts[block] == 0
        self._counts[block] = self._of_rank[rank][block] = 1
        self.held_by_rank[rank] += 1
        return block

    def retain(self, block: int, rank: int) -> None:
        """Add a holder to a held or idle block."""
        self._idle.discard(block)
        self._count(block, rank, 1)

    def release(self, block: int, rank: int, *, keep: bool) -> bool:
        """Remove a holder. If it was the last (True), the block is idle with `keep`, else free."""
        assert self._of_rank[rank][block] > 0
        self._count(block, rank, -1)
        if self._counts[block]:
            return False
        if keep:
            self._idle.add(block)
        else:
            self._free.append(block)
        return True

    def reclaim(self, block: int) -> None:
        """Turn an idle block into a free one. Its content is lost."""
        self._idle.remove(block)
        self._free.append(block)

    def check(self, holders: dict[int, list[int]]) -> None:
        """Compare with `holders` (block -> ranks of its holders). Raises `AccountingError`."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise AccountingError("a block is in the free list twice")
        if free & self._idle:
            raise AccountingError(f"blocks both free and idle: {sorted(free & self._idle)[:8]}")
        held = [0 for _ in _RANKS]
        for block, count in enumerate(self._counts):
            ranks: Sequence[int] = holders.get(block, ())
            if [self._of_rank[rank][block] for rank in _RANKS] != list(map(ranks.count, _RANKS)):
                raise AccountingError(f"block {block} counts other holders than tables say {ranks}")
            if count != len(ranks):
                raise AccountingError(
                    f"block {block} counts {count} holders, tables say {len(ranks)}"
                )
            if (count == 0) != (block in free or block in self._idle):
                raise AccountingError(f"block {block} with {count} holders is lost or owned twice")
            if ranks:
                held[min(ranks)] += 1
        if held != self.held_by_rank:
            raise AccountingError(f"{held} blocks are held by rank, {self.held_by_rank} counted")

    def _count(self, block: int, rank: int, change: int) -> None:
        before = self._first_rank(block)
        self._counts[block] += change
        self._of_rank[rank][block] += change
        after = self._first_rank(block)
        if before != after:
            if before is not None:
                self.held_by_rank[before] -= 1
            if after is not None:
                self.held_by_rank[after] += 1

    def _first_rank(self, block: int) -> int | None:
        for rank, counts in enumerate(self._of_rank):
            if counts[block]:
                return rank
        return None
