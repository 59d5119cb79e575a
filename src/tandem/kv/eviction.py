"""Which cached block is evicted first when blocks are needed: one small class per strategy.

A strategy only orders nodes that may be evicted (idle leaves of the prefix tree). The queue finds
these nodes and puts a policy's own order first. Lower keys are evicted first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem.kv.prefix_tree import Node, PrefixTree


class Eviction(Protocol):
    """Orders evictable nodes."""

    @property
    def spares_readers(self) -> bool:
        """Whether blocks without readers are evicted before those with readers."""
        ...

    def key(self, node: Node) -> tuple[float, ...]:
        """Sort key of an idle leaf; the lowest is evicted first. Must not change the node."""
        ...


class LeastRecentlyUsed:
    """Blocks of retired adapter versions first, then the oldest."""

    spares_readers = False

    def key(self, node: Node) -> tuple[float, ...]:
        """Retired, least recently used."""
        return (not node.namespace.retired, node.last_access)


class ReadersLast:
    """Blocks of retired adapter versions first, then blocks without readers, then the oldest."""

    spares_readers = True

    def key(self, node: Node) -> tuple[float, ...]:
        """Retired, without readers, least recently used."""
        return (not node.namespace.retired, node.readers > 0, node.last_access)


class ByClass:
    """Echo's priorities (section 4.2): a block with readers has their number, one that an online
    request has left 0.5, any other 0. The lowest goes first, then the oldest. Running sequences
    hold their blocks. Blocks of retired adapter versions go before all."""

    spares_readers = True

    def key(self, node: Node) -> tuple[float, ...]:
        """Retired, priority, least recently used."""
        priority = node.readers or (0.5 if node.online else 0.0)
        return (not node.namespace.retired, priority, node.last_access)


class EvictionQueue:
    """Evictable nodes in order. Invariant: a node was offered after it became evictable."""

    def __init__(
        self, strategy: Eviction, tree: PrefixTree, is_held: Callable[[Node], bool]
    ) -> None:
        self.strategy, self._tree, self._is_held = strategy, tree, is_held
        self._heap: list[tuple[tuple[float, ...], int, Node]] = []
        self._pushes = 0
        self._wish: tuple[int, ...] = ()
        self._places: dict[int, int] = {}  # preferred block: its rank; filled on first use
        self._wished: list[tuple[int, int, Node]] = []

    def may_go(self, node: Node) -> bool:
        """Whether a node is an idle leaf of the tree."""
        return bool(node.blocks) and not node.cached_children and not self._is_held(node)

    def offer(self, node: Node) -> None:
        """A node became an idle leaf, or its key changed. Other nodes are skipped by `next`."""
        if node.cached_children:
            return
        self._push(node)
        if node.blocks[0] in self._places:
            self._push_wished(node)
        if len(self._heap) > 64 + 2 * len(self._tree):  # most entries are stale
            self._rebuild()

    def offer_again(self, node: Node) -> None:
        """What the key of a node depends on has changed. The node may be held, or no leaf."""
        if self.may_go(node):
            self.offer(node)

    def prefer(self, blocks: tuple[int, ...]) -> None:
        """Evict these blocks (of group 0) first, in this order, until the next call.

        The first of them that is evictable is always next, so a parent follows its children
        wherever it is listed. The blocks are looked up when one is needed, in O(all nodes).
        """
        self._wish, self._places, self._wished = blocks, {}, []

    def next(self) -> Node:
        """The node to evict now. There must be one, and the caller evicts it."""
        if self._wish:
            if not self._places:
                self._look_up()
            while self._wished:
                node = heapq.heappop(self._wished)[2]
                if self.may_go(node):
                    return node
        while True:
            while self._heap:
                key, _, node = heapq.heappop(self._heap)
                if self.may_go(node) and self.strategy.key(node) == key:
                    return node
            self._rebuild()
            assert self._heap, "the caller has made sure that a block is available"

    def _push(self, node: Node) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (self.strategy.key(node), self._pushes, node))

    def _push_wished(self, node: Node) -> None:
        self._pushes += 1
        heapq.heappush(self._wished, (self._places[node.blocks[0]], self._pushes, node))

    def _look_up(self) -> None:
        for block in self._wish:
            self._places.setdefault(block, len(self._places))
        for node in self._tree.nodes():
            if node.blocks[0] in self._places and self.may_go(node):
                self._push_wished(node)

    def _rebuild(self) -> None:
        self._heap = []
        for node in self._tree.nodes():
            if self.may_go(node):
                self._push(node)


@dataclass(frozen=True, slots=True)
class IdleBlock:
    """A cached block without a holder."""

    block: int  # its number in group 0
    depth: int  # number of blocks before it in its prefix
    readers: int  # waiting sequences that would use it
    last_access: int  # orders by use
    leaf: bool  # can be evicted now; others after their children
    adapter: str | None
    online: bool  # whether an online request has used it


def idle_blocks(tree: PrefixTree, is_held: Callable[[Node], bool]) -> list[IdleBlock]:
    """Every cached block without a holder, children after parents. Costs O(blocks)."""
    return [
        IdleBlock(
            node.blocks[0],
            node.depth - 1,
            node.readers,
            node.last_access,
            not node.cached_children,
            node.namespace.adapter,
            node.online,
        )
        for node in tree.nodes()
        if not is_held(node)
    ]
