"""Which cached block goes first when blocks are needed: one small class per strategy.

A strategy only orders nodes that may go (idle leaves of the prefix tree); the cache does the
rest. Lower keys go first.
"""

from __future__ import annotations

from typing import Protocol

from tandem.kv.prefix_tree import Node


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
