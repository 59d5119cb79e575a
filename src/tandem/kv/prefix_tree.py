"""Radix tree over full blocks: which token prefixes have their KV in the cache.

A node is one full block, identified by (parent, its tokens). A root stands for one namespace
(adapter content hash, tenant salt), so no adapter version or tenant finds KV of another. Waiting
sequences register as readers of the nodes that they would use. The registration follows the tree as
it grows and shrinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.core.errors import AccountingError

TokenBlock = tuple[int, ...]


class Namespace:
    """The root of one (adapter content hash, tenant) pair. `retired` blocks are evicted first."""

    __slots__ = ("adapter", "retired", "root", "tenant")

    def __init__(self, adapter: str | None, tenant: str) -> None:
        self.adapter = adapter
        self.tenant = tenant
        self.retired = False
        self.root = Node(None, (), (), self)


class Reader:
    """The registration of a waiting sequence. `depth` nodes of its prefix are in the tree now."""

    __slots__ = ("blocks", "depth", "node")

    def __init__(self, blocks: list[TokenBlock], node: Node) -> None:
        self.blocks = blocks
        self.node = node
        self.depth = 0

    @property
    def next_block(self) -> TokenBlock | None:
        """The first block of its prefix that is not in the tree; None if all are."""
        return self.blocks[self.depth] if self.depth < len(self.blocks) else None


class Node:
    """One cached block per KV group. `readers` counts the waiting sequences that would use it.

    `waiting` contains the readers whose cached prefix ends here, by the block that each needs next
    (None: no block is left). So a new child finds its readers, however many wait for other blocks.
    """

    __slots__ = (
        "blocks",
        "children",
        "last_access",
        "namespace",
        "parent",
        "readers",
        "tokens",
        "waiting",
    )

    def __init__(
        self, parent: Node | None, tokens: TokenBlock, blocks: tuple[int, ...], ns: Namespace
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.namespace = ns
        self.children: dict[TokenBlock, Node] = {}
        self.readers = 0
        self.last_access = 0
        self.waiting: dict[TokenBlock | None, set[Reader]] = {}

    def await_next(self, reader: Reader) -> None:
        """Register a reader, whose `node` this is, as waiting here."""
        self.waiting.setdefault(reader.next_block, set()).add(reader)

    def stop_awaiting(self, reader: Reader) -> None:
        """Remove a reader from `waiting`. Called before its `depth` changes."""
        block = reader.next_block
        readers = self.waiting[block]
        readers.remove(reader)
        if not readers:
            del self.waiting[block]

    def awaiting(self) -> Iterator[tuple[TokenBlock | None, Reader]]:
        """The readers that wait here, each with its key in `waiting`."""
        for block, readers in self.waiting.items():
            for reader in readers:
                yield block, reader


class PrefixTree:
    """Finds, adds and removes nodes; owns no block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._namespaces: dict[tuple[str | None, str], Namespace] = {}
        self._tick = 0
        self._num_nodes = 0

    def __len__(self) -> int:
        return self._num_nodes

    def split(self, tokens: Sequence[int], limit: int) -> list[TokenBlock]:
        """The full blocks within the first `limit` tokens."""
        size = self._block_size
        return [tuple(tokens[at : at + size]) for at in range(0, limit - size + 1, size)]

    def match(
        self, adapter: str | None, tenant: str, tokens: Sequence[int], limit: int
    ) -> list[Node]:
        """Nodes of the longest cached prefix within the first `limit` tokens. Pins nothing."""
        namespace = self._namespaces.get((adapter, tenant))
        if namespace is None:
            return []
        found: list[Node] = []
        node, size = namespace.root, self._block_size
        for at in range(0, limit - size + 1, size):
            child = node.children.get(tuple(tokens[at : at + size]))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def root(self, adapter: str | None, tenant: str) -> Node:
        """The root of a namespace. Makes it if it is new."""
        key = (adapter, tenant)
        namespace = self._namespaces.get(key)
        if namespace is None:
            namespace = self._namespaces[key] = Namespace(adapter, tenant)
        return namespace.root

    def insert(self, parent: Node, tokens: TokenBlock, blocks: tuple[int, ...]) -> Node:
        """Add a child that is not there yet. Readers that waited for it move to it."""
        assert tokens not in parent.children and len(tokens) == self._block_size
        node = Node(parent, tokens, blocks, parent.namespace)
        parent.children[tokens] = node
        self._num_nodes += 1
        self.touch(node)
        for reader in parent.waiting.pop(tokens, ()):
            self._descend(reader)
        return node

    def touch(self, node: Node) -> None:
        """Note a use. `last_access` is a counter, so replays give the same order."""
        self._tick += 1
        node.last_access = self._tick

    def remove(self, node: Node) -> None:
        """Remove a leaf. Its readers move back to the parent."""
        assert node.parent is not None and not node.children
        fallen = [reader for _, reader in node.awaiting()]
        node.waiting.clear()
        for reader in fallen:
            node.readers -= 1
            reader.depth -= 1
            reader.node = node.parent
            node.parent.await_next(reader)
        assert node.readers == 0
        del node.parent.children[node.tokens]
        self._num_nodes -= 1

    def add_reader(
        self, adapter: str | None, tenant: str, tokens: Sequence[int], limit: int
    ) -> Reader:
        """Register a future reader of the first `limit` tokens."""
        reader = Reader(self.split(tokens, limit), self.root(adapter, tenant))
        self._descend(reader)
        return reader

    def remove_reader(self, reader: Reader) -> None:
        """Remove a registration."""
        reader.node.stop_awaiting(reader)
        node: Node | None = reader.node
        while node is not None and node.parent is not None:
            node.readers -= 1
            node = node.parent

    def _descend(self, reader: Reader) -> None:
        """Move a reader, which waits nowhere, as far down as the tree goes; it waits there."""
        node = reader.node
        while (block := reader.next_block) is not None:
            child = node.children.get(block)
            if child is None:
                break
            child.readers += 1
            reader.depth += 1
            node = child
        reader.node = node
        node.await_next(reader)

    def namespaces_of(self, adapter: str) -> list[Namespace]:
        """All tenants' namespaces of one adapter version."""
        return [ns for (name, _), ns in self._namespaces.items() if name == adapter]

    def remove_namespace(self, namespace: Namespace) -> None:
        """Forget an empty namespace that no table or reader refers to."""
        assert not namespace.root.children and not namespace.root.waiting
        del self._namespaces[namespace.adapter, namespace.tenant]

    def nodes(self, namespace: Namespace | None = None) -> Iterator[Node]:
        """Every node, or those of one namespace; children after parents."""
        roots = [namespace] if namespace is not None else list(self._namespaces.values())
        stack = [child for ns in roots for child in ns.root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Verify links and counts. Raises `AccountingError`."""
        if (num_nodes := sum(1 for _ in self.nodes())) != self._num_nodes:
            raise AccountingError(f"the tree counts {self._num_nodes} nodes, there are {num_nodes}")
        for namespace in self._namespaces.values():
            counted = _count_readers(namespace.root)
            for node in (namespace.root, *self.nodes(namespace)):
                if any(r.node is not node or r.next_block != b for b, r in node.awaiting()):
                    raise AccountingError("a reader waits at the wrong place")
            for node in self.nodes(namespace):
                if node.parent is None or node.parent.children.get(node.tokens) is not node:
                    raise AccountingError("a prefix-tree node is not its parent's child")
                if node.readers != counted[id(node)]:
                    raise AccountingError(
                        f"a node counts {node.readers} readers, there are {counted[id(node)]}"
                    )


def _count_readers(root: Node) -> dict[int, int]:
    """Readers at or below each node. No recursion, since trees are as deep as prompts are long."""
    order: list[Node] = [root]
    for node in order:
        order.extend(node.children.values())
    counted = {id(node): sum(map(len, node.waiting.values())) for node in order}
    for node in reversed(order):
        if node.parent is not None:
            counted[id(node.parent)] += counted[id(node)]
    return counted
