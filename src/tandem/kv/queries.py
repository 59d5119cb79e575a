"""What is known of the KV cache: what is free, held, cached, and what a sequence would need.

Invariant: no question changes an answer. `kv.cache` has the changes.
"""

from __future__ import annotations

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.kv.eviction import Eviction, EvictionQueue, IdleBlock, idle_blocks
from tandem.kv.holders import Holders
from tandem.kv.pool import BlockPool
from tandem.kv.prefix_tree import Node, PrefixTree
from tandem.kv.readers import Readers, is_private, namespace_of, shared_tokens
from tandem.kv.tables import BlockTable


class CacheQueries:
    """Blocks, tables and the prefix tree of one engine, to be read.

    Sequences are identified by `seq_id`. Called from one thread.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: int,
        prefix_caching: bool,
        eviction: Eviction,
    ) -> None:
        assert num_blocks > 0 and block_size > 0 and groups > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._pools = [BlockPool(num_blocks) for _ in range(groups)]
        self.held_by_rank = self._pools[0].held_by_rank  # see `BlockPool`; read only
        self._tree = PrefixTree(block_size)
        self._leaving = EvictionQueue(eviction, self._tree, self._is_held)
        self._tables: dict[int, BlockTable] = {}
        self.holders = Holders(self._pools[0], self._tables, block_size)
        self._readers = Readers(self._tree, block_size, self._is_held, self._leaving.offer_again)
        self.offline = self._readers.offline  # the offline sequences that wait

    @property
    def available_blocks(self) -> int:
        """Blocks available without a preemption: free and evictable ones."""
        pool = self._pools[0]
        return pool.free + pool.idle

    @property
    def free_blocks(self) -> int:
        """Blocks without content."""
        return self._pools[0].free

    @property
    def held_blocks(self) -> int:
        """Blocks that running sequences hold."""
        return self._pools[0].held

    @property
    def cached_blocks(self) -> int:
        """Blocks without a holder whose content is cached."""
        return self._pools[0].idle

    def wanted_evictions(self, num_blocks: int) -> float:
        """How many blocks with waiting readers have to go for `num_blocks` new ones: what is left
        to evict once the others are gone, or their share if the strategy does not spare them."""
        evicted, idle = num_blocks - self.free_blocks, self.cached_blocks
        if evicted <= 0 or idle == 0:
            return 0.0
        if self._leaving.strategy.spares_readers:
            return max(0.0, evicted - (idle - self._readers.wanted))
        return evicted * self._readers.wanted / idle

    def idle_blocks(self) -> list[IdleBlock]:
        """Every cached block without a holder, children after parents. Costs O(blocks)."""
        return idle_blocks(self._tree, self._is_held)

    def holds(self, seq: Sequence) -> bool:
        """True if the sequence has a block table."""
        return seq.seq_id in self._tables

    def match(self, seq: Sequence) -> int:
        """Tokens of the sequence that are cached now. Pins nothing."""
        return len(self._match(seq)) * self.block_size

    def new_blocks(self, seq: Sequence, num_tokens: int, ranks: int = len(WorkClass)) -> int:
        """Blocks that a waiting sequence of so many tokens needs beside those that others hold;
        `ranks`: others of lower ranks (`Sequence.order`) only."""
        pool, found = self._pools[0], self._match(seq)
        held = sum([pool.count_below(node.blocks[0], ranks) > 0 for node in found])
        return self._blocks_for(num_tokens) - held

    def missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """New blocks needed to forward `num_tokens` more tokens of an attached sequence."""
        table = self._tables[seq.seq_id]
        copy = 1 if self._shares_tail(seq, table) else 0
        return max(0, self._blocks_for(seq.computed + num_tokens) - len(table)) + copy

    def fitting_tokens(self, seq: Sequence) -> int:
        """How many more tokens of an attached sequence fit without a preemption."""
        table = self._tables[seq.seq_id]
        blocks = self.available_blocks - (1 if self._shares_tail(seq, table) else 0)
        if blocks < 0:
            return 0
        return (len(table) + blocks) * self.block_size - seq.computed

    def table(self, seq: Sequence, end: int) -> tuple[tuple[int, ...], ...]:
        """Blocks that cover positions `[0, end)`, per group."""
        return self._tables[seq.seq_id].prefix(-(-end // self.block_size))

    def _match(self, seq: Sequence) -> list[Node]:
        if not self._prefix_caching or is_private(seq):
            return []
        return self._tree.match(*namespace_of(seq), seq.tokens, shared_tokens(seq))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _shares_tail(self, seq: Sequence, table: BlockTable) -> bool:
        index, blocks = seq.computed // self.block_size, table.groups[0]
        return index < len(blocks) and self._pools[0].count(blocks[index]) > 1

    def _is_held(self, node: Node) -> bool:
        return self._pools[0].count(node.blocks[0]) > 0
