"""The changes of the KV cache: attach, extend, commit, fork, release; and its accounting.

Bookkeeping only; the executor moves the data. Full blocks of a released sequence stay in the prefix
tree until they are evicted, so preempted or finished work is found again. A private sequence (one
under working parameters) neither finds nor leaves blocks there. Invariant: the ancestors of a held
node are held, so idle nodes can always be evicted leaf first.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import AccountingError
from tandem.core.plan import BlockCopy
from tandem.core.sequence import Sequence
from tandem.kv.eviction import Eviction, ReadersLast
from tandem.kv.prefix_tree import Node
from tandem.kv.queries import CacheQueries
from tandem.kv.readers import is_private, namespace_of
from tandem.kv.tables import BlockTable


@dataclass(slots=True)
class CacheCounters:
    """Totals since the start."""

    queries_tokens: int = 0  # of prefixes looked up by `attach`
    hits_tokens: int = 0  # of these, found in the cache
    evictions_blocks: int = 0

    def count_lookup(self, seq: Sequence, hits_tokens: int) -> None:
        """Count an `attach` that led to an admission. A preempted sequence that finds its own
        blocks again has saved nothing, so it is not counted."""
        if is_private(seq) or seq.preemptions:
            return
        self.queries_tokens += len(seq.tokens)
        self.hits_tokens += hits_tokens


class KVCache(CacheQueries):
    """The changes. Reads `tokens`, `computed` and `adapter` of sequences and changes none.

    Called by the scheduler only, from one thread.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: int = 1,
        prefix_caching: bool = True,
        eviction: Eviction | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, groups, prefix_caching, eviction or ReadersLast())
        self.counters = CacheCounters()

    def attach(self, seq: Sequence) -> int:
        """Give a sequence its table, pinning the cached prefix; returns that prefix in tokens.

        The last token is never taken from the cache, since its logits are needed.
        """
        assert seq.seq_id not in self._tables and seq.computed == 0 and not seq.mixed
        self.remove_reader(seq)
        found = self._match(seq)
        # A private table stays at the root, so any permanent root will do.
        key = (None, "") if is_private(seq) else namespace_of(seq)
        root = self._tree.root(*key)
        table = BlockTable(len(self._pools), root, seq.order[0])
        for node in found:
            self._hold(node, table.rank)
            table.nodes.append(node)
            table.append(node.blocks)
        self._tables[seq.seq_id] = table
        return len(found) * self.block_size

    def try_slot(self, seq: Sequence, position: int) -> tuple[tuple[int, ...], ...] | None:
        """The table for the token at `position`, the first without a slot or one that has it. None
        if that takes more than an own block, or one that is available without a preemption; nothing
        changes then."""
        table = self._tables[seq.seq_id]
        if position < table.own_end:
            return table.whole
        index, blocks = position // self.block_size, table.groups[0]
        if index == len(blocks):
            if not self.available_blocks:
                return None
            table.append(self._allocate(table.rank))
        elif self._pools[0].count(blocks[index]) > 1:
            return None
        elif index + 1 < len(blocks):
            return table.prefix(index + 1)
        table.own_end = (index + 1) * self.block_size
        return table.whole

    def try_extend(self, seq: Sequence, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        """Get blocks for `num_tokens` after `seq.computed`. Without enough blocks None, and nothing
        changes.

        Evicts cached blocks as needed. Returns copies that must run before the forward:
        copy-on-write of a tail block that is shared with a forked sequence.
        """
        table, end = self._tables[seq.seq_id], seq.computed + num_tokens
        shared = self._shares_tail(seq, table)
        missing = -(-end // self.block_size) - len(table.groups[0])
        if missing <= 0 and not shared:
            return ()
        if max(0, missing) + shared > self.available_blocks:
            return None
        copies = self._unshare_tail(seq, table) if shared else ()
        for _ in range(missing):
            table.append(self._allocate(table.rank))
        return copies

    def commit(self, seq: Sequence) -> None:
        """Register the blocks that `seq.computed` has filled, so that other sequences find them."""
        table, size = self._tables[seq.seq_id], self.block_size
        if (len(table.nodes) + 1) * size > seq.computed:  # the usual decode
            return
        if not self._prefix_caching or is_private(seq) or seq.mixed:
            return
        while (len(table.nodes) + 1) * size <= seq.computed:
            index, parent = len(table.nodes), table.last_node
            tokens = tuple(seq.tokens[index * size : (index + 1) * size])
            mine, node = table.logical(index), self._tree.find(parent, tokens)
            if node is None:
                node = self._tree.insert(parent, tokens, mine)
                if node.readers:
                    self.offline.note_cached(node)
            elif node.blocks != mine:  # computed twice at the same time: one copy stays
                self._hold(node, table.rank)
                table.replace(index, node.blocks)
                self._drop(mine, table.rank)
            table.nodes.append(node)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give `child` the parent's blocks, all shared. The first that writes copies the tail."""
        assert child.seq_id not in self._tables
        source = self._tables[parent.seq_id]
        source.own_end = 0
        table = BlockTable(len(self._pools), source.root, child.order[0])
        for index in range(len(source)):
            blocks = source.logical(index)
            for pool, block in zip(self._pools, blocks, strict=True):
                pool.retain(block, table.rank)
            table.append(blocks)
        table.nodes.extend(source.nodes)
        self._tables[child.seq_id] = table

    def release(self, seq: Sequence, *, discard: bool = False, used: bool = True) -> None:
        """Remove a sequence's table. Its blocks in the tree stay there, idle; `used` by it or not.

        With `discard`, its blocks that no other sequence holds or continues leave the tree too,
        since their content cannot be trusted.
        """
        table = self._tables.pop(seq.seq_id)
        rank, online = table.rank, table.rank == 0
        for index in range(len(table) - 1, -1, -1):
            blocks = table.logical(index)
            if index >= len(table.nodes):
                self._drop(blocks, rank)
                continue
            node = table.nodes[index]
            if used:
                self._tree.touch(node)
                node.online |= online
            last = [p.release(b, rank, keep=True) for p, b in zip(self._pools, blocks, strict=True)]
            if not all(last):
                continue
            self._readers.wanted += node.readers > 0
            if discard and not node.cached_children:
                self._evict(node)
            else:
                self._leaving.offer(node)

    def add_reader(self, seq: Sequence) -> None:
        """A waiting sequence announces which blocks it will read. Offline ones enter `offline`."""
        self._readers.add(seq, shared=self._prefix_caching and not is_private(seq))

    def remove_reader(self, seq: Sequence) -> None:
        """The sequence no longer waits. Idempotent."""
        self._readers.remove(seq)

    def retire(self, adapter: str, *, retired: bool = True) -> None:
        """Evict blocks of this adapter version first from now on; undo with `retired=False`."""
        for namespace in self._tree.namespaces_of(adapter):
            namespace.retired = retired
            for node in self._tree.nodes(namespace):
                self._leaving.offer_again(node)

    def drop_adapter(self, adapter: str) -> None:
        """Free every block of a version that no sequence uses."""
        for namespace in self._tree.namespaces_of(adapter):
            for node in reversed(list(self._tree.nodes(namespace))):
                self._evict(node)
            self._tree.remove_namespace(namespace)

    def evict_first(self, blocks: tuple[int, ...]) -> None:
        """Until the next call, evict these blocks (of group 0) first, in this order.

        Blocks that are not idle are ignored. A parent follows its children.
        """
        self._leaving.prefer(blocks)

    def check(self) -> None:  # noqa: C901
        """Account for every block and reader. Raises `AccountingError`. Costs O(blocks)."""
        self._readers.check()
        in_tree = list(self._tree.nodes())
        for group, pool in enumerate(self._pools):
            holders: dict[int, list[int]] = {}
            for table in self._tables.values():
                for block in table.groups[group]:
                    holders.setdefault(block, []).append(table.rank)
            pool.check(holders)
            owned = {node.blocks[group] for node in in_tree}
            if len(owned) != len(in_tree):
                raise AccountingError("two nodes share a block")
            if pool.idle != sum(1 for block in owned if pool.count(block) == 0):
                raise AccountingError("an idle block is in no node, or a node's block is free")
        for table in self._tables.values():
            last = table.groups[0][-1] if table.own_end else None
            whole = len(table) * self.block_size
            shared = last is not None and self._pools[0].count(last) > 1
            if table.own_end not in (0, whole) or (shared and len(table.nodes) < len(table)):
                raise AccountingError("a table takes a block for its own that is not")
        for node in in_tree:
            parent = node.parent
            if parent is None or parent.parent is None:
                continue
            if self._is_held(node) and not self._is_held(parent):
                raise AccountingError("a held node has an idle parent")

    def _unshare_tail(self, seq: Sequence, table: BlockTable) -> tuple[BlockCopy, ...]:
        index = seq.computed // self.block_size
        assert index >= len(table.nodes), "blocks of the tree are full and never written"
        old, new = table.logical(index), self._allocate(table.rank)
        table.replace(index, new)
        self._drop(old, table.rank)
        if seq.computed % self.block_size == 0:  # the sequence has no token in it yet
            return ()
        return tuple(BlockCopy(g, old[g], new[g]) for g in range(len(self._pools)))

    def _allocate(self, rank: int) -> tuple[int, ...]:
        if self._pools[0].free == 0:
            self._evict(self._leaving.next())
        return tuple(pool.allocate(rank) for pool in self._pools)

    def _drop(self, blocks: tuple[int, ...], rank: int) -> None:
        for pool, block in zip(self._pools, blocks, strict=True):
            pool.release(block, rank, keep=False)

    def _hold(self, node: Node, rank: int) -> None:
        self._readers.wanted -= node.readers > 0 and not self._is_held(node)
        for pool, block in zip(self._pools, node.blocks, strict=True):
            pool.retain(block, rank)
        self._tree.touch(node)

    def _evict(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        self._readers.wanted -= node.readers > 0
        for pool, block in zip(self._pools, node.blocks, strict=True):
            pool.reclaim(block)
        self._tree.remove(node)
        self.counters.evictions_blocks += 1
        self._leaving.offer_again(parent)
