"""Which cached block goes first when blocks are needed: one small class per strategy.

A strategy only orders nodes that may go (idle leaves of the prefix tree); the queue finds them and
puts a policy's own order before it. Lower keys go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem.kv.prefix_tree import Node, PrefixTree


class Eviction(Protocol):
    """Orders evictable nodes."""

    def key(self, node: Node) -> tuple[float, ...]:
        """Sort key of an idle leaf; the lowest is evicted first. Must not change the node."""
        ...


class LeastRecentlyUsed:
    """Blocks of retired adapter versions first, then those nobody waits for, then the oldest."""

    def key(self, node: Node) -> tuple[float, ...]:
        """See the class."""
        return (not node.namespace.retired, node.readers > 0, node.last_access)


class EvictionQueue:
    """The nodes that may go, in their order. Invariant: a node that may go was offered since."""

    def __init__(
        self, strategy: Eviction, tree: PrefixTree, is_held: Callable[[Node], bool]
    ) -> None:
        self._strategy, self._tree, self._is_held = strategy, tree, is_held
        self._heap: list[tuple[tuple[float, ...], int, Node]] = []
        self._pushes = 0
        self._wish: tuple[int, ...] = ()
        self._places: dict[int, int] = {}  # of the wished blocks, once one is needed
        self._wished: list[tuple[int, int, Node]] = []

    def may_go(self, node: Node) -> bool:
        """Whether a node is an idle leaf of the tree."""
        linked = node.parent is not None and node.parent.children.get(node.tokens) is node
        return linked and not node.children and not self._is_held(node)

    def offer(self, node: Node) -> None:
        """A node became an idle leaf, or its key has changed. One that did not is passed over."""
        if node.children:
            return
        self._push(node)
        if node.blocks[0] in self._places:
            self._push_wished(node)
        if len(self._heap) > 64 + 2 * len(self._tree):  # most of it is stale
            self._rebuild()

    def prefer(self, blocks: tuple[int, ...]) -> None:
        """Let these (of group 0) go first, in this order, until the next call.

        At any time the first one that may go is next: a parent follows its children wherever it is
        listed. The blocks are looked up when one is needed, in O(all nodes).
        """
        self._wish, self._places, self._wished = blocks, {}, []

    def next(self) -> Node:
        """The node that goes now. There must be one; the caller evicts it."""
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
                if self.may_go(node) and self._strategy.key(node) == key:
                    return node
            self._rebuild()
            assert self._heap, "the caller has made sure that a block is available"

    def _push(self, node: Node) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (self._strategy.key(node), self._pushes, node))

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
    """A cached block (its number in group 0) that nobody holds.

    `depth` counts the blocks before it in its prefix, `readers` the waiting sequences that would
    use it, `last_access` orders by use. A `leaf` can be evicted now, others after their children.
    """

    block: int
    depth: int
    readers: int
    last_access: int
    leaf: bool
    adapter: str | None


def idle_blocks(tree: PrefixTree, is_held: Callable[[Node], bool]) -> list[IdleBlock]:
    """Every cached block that nobody holds, children after parents; costs O(blocks)."""
    depths: dict[int, int] = {}
    found = []
    for node in tree.nodes():
        depths[id(node)] = depth = depths.get(id(node.parent), -1) + 1
        if not is_held(node):
            found.append(
                IdleBlock(
                    node.blocks[0],
                    depth,
                    node.readers,
                    node.last_access,
                    not node.children,
                    node.namespace.adapter,
                )
            )
    return found
