"""Which cached block goes first when blocks are needed: one small class per strategy.

A strategy only orders nodes that may go (idle leaves of the prefix tree); the cache does the
rest. Lower keys go first.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class IdleBlock:
    """A cached block (its number in group 0) that nobody holds.

    `depth` counts the blocks before it in its prefix, `readers` the waiting sequences that would
    use it, `last_access` orders by use. Only a `leaf` can be evicted now; then its parent is one.
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
