"""Waiting sequences, and the blocks that each of them will read: future readers of the cache.

Knows prefixes and counts; the cache tells it what is held, cached and evicted. Invariant: `wanted`
is the number of idle blocks with readers.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.errors import AccountingError
from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.kv.offline_pool import OfflinePool
from tandem.kv.prefix_tree import Node, PrefixTree


class Readers:
    """All waiting sequences; the offline ones are in the pool `offline`, too."""

    def __init__(
        self,
        tree: PrefixTree,
        block_size: int,
        is_held: Callable[[Node], bool],
        offer: Callable[[Node], None],
    ) -> None:
        """`offer` hears of each node whose place in the order of eviction changes."""
        self._tree, self._is_held, self._offer = tree, is_held, offer
        self._last: dict[int, Node] = {}  # the end of the prefix that a sequence will read
        self.offline = OfflinePool(block_size)
        self.wanted = 0

    def add(self, seq: Sequence, *, shared: bool) -> None:
        """A sequence waits; `shared`: it may read blocks of others. Idempotent."""
        if shared and seq.seq_id not in self._last:
            last = self._tree.add_reader(*namespace_of(seq), seq.tokens, shared_tokens(seq))
            self._last[seq.seq_id] = last
            self.wanted += self._read_by_one(last)
            self._offer(_deepest_cached(last))
        if seq.request.work_class is WorkClass.OFFLINE and seq.scoring is None:
            self.offline.add(seq, self._last.get(seq.seq_id))

    def remove(self, seq: Sequence) -> None:
        """A sequence no longer waits. Idempotent."""
        self.offline.remove(seq)
        last = self._last.pop(seq.seq_id, None)
        if last is not None:
            self.wanted -= self._read_by_one(last)
            self._tree.remove_reader(last)
            self._offer(_deepest_cached(last))

    def check(self) -> None:
        """Verify all counts. Raises `AccountingError`."""
        self._tree.check(self._last.values())
        self.offline.check()
        wanted = sum(1 for node in self._tree.nodes() if node.readers and not self._is_held(node))
        if wanted != self.wanted:
            raise AccountingError(f"{wanted} idle blocks have readers, {self.wanted} were counted")

    def _read_by_one(self, last: Node) -> int:
        """How many idle blocks up to `last` have one reader: the one whose prefix ends there."""
        node, found = _deepest_cached(last), 0
        while node.readers == 1 and node.parent is not None:
            found += not self._is_held(node)
            node = node.parent
        return found


def _deepest_cached(node: Node) -> Node:
    """The last cached node on the way to this one; the root if none is cached."""
    while not node.cached:
        assert node.parent is not None
        node = node.parent
    return node


def namespace_of(seq: Sequence) -> tuple[str | None, str]:
    """Which adapter version's and tenant's blocks a sequence may read."""
    return (seq.adapter.content_hash if seq.adapter is not None else None, seq.request.tenant)


def is_private(seq: Sequence) -> bool:
    """Whether it neither finds nor leaves blocks: it runs under working parameters."""
    return seq.scoring is not None and seq.scoring.private


def shared_tokens(seq: Sequence) -> int:
    """Tokens that may come from the cache. The last one may not, nor positions that are still to be
    scored."""
    if seq.scoring is not None:
        return min(seq.scored, len(seq.tokens)) - 1
    if seq.request.sampling.prompt_logprobs is None or seq.scored >= seq.prompt_tokens:
        return len(seq.tokens) - 1
    return min(seq.scored, len(seq.tokens)) - 1
