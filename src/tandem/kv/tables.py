"""Block tables: which blocks contain a sequence's KV, per KV group.

A KV group is a set of layers x KV heads that shares block numbers. There is one group today, but
every table has the axis. Invariant: all groups of a table have the same length.
"""

from __future__ import annotations

from tandem.kv.prefix_tree import Node


class BlockTable:
    """Blocks of one sequence in order of position. `rank` is the sequence's (`Sequence.order`).

    `own_end` is the end position of the last block, if that block was found to belong to this table
    only and nothing has changed since; else 0. Once the block is full the tree may share it, but no
    sequence writes to it again.

    | logical blocks | owner |
    |---|---|
    | `[0, len(nodes))` | the prefix tree; this table is one of their holders |
    | `[len(nodes), len(self))` | this table, and tables forked from it until one writes |
    """

    __slots__ = ("_whole", "groups", "nodes", "own_end", "rank", "root")

    def __init__(self, groups: int, root: Node, rank: int) -> None:
        self.groups: list[list[int]] = [[] for _ in range(groups)]
        self.nodes: list[Node] = []
        self.root = root
        self.rank = rank
        self.own_end = 0
        self._whole: tuple[tuple[int, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.groups[0])

    @property
    def last_node(self) -> Node:
        """The deepest node of the committed prefix (the root if there is none)."""
        return self.nodes[-1] if self.nodes else self.root

    def logical(self, index: int) -> tuple[int, ...]:
        """Physical blocks of one logical block, one per group."""
        return tuple(group[index] for group in self.groups)

    def append(self, blocks: tuple[int, ...]) -> None:
        """Add one logical block at the end."""
        self._whole, self.own_end = None, 0
        for group, block in zip(self.groups, blocks, strict=True):
            group.append(block)

    def replace(self, index: int, blocks: tuple[int, ...]) -> None:
        """Replace one logical block."""
        self._whole, self.own_end = None, 0
        for group, block in zip(self.groups, blocks, strict=True):
            group[index] = block

    @property
    def whole(self) -> tuple[tuple[int, ...], ...]:
        """All blocks of every group, as a plan carries them."""
        whole = self._whole
        if whole is None:  # cached: successive decodes need the same blocks
            whole = self._whole = tuple([tuple(group) for group in self.groups])
        return whole

    def prefix(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """The first `num_blocks` blocks of every group, as a plan carries them."""
        whole = self.whole
        if num_blocks == len(whole[0]):
            return whole
        return tuple([group[:num_blocks] for group in whole])
