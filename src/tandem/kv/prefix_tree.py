"""Radix tree over full blocks: which token prefixes are in the cache, and which will be read.

A node is one full block, identified by (parent, its tokens). A root stands for one namespace
(adapter content hash, tenant salt), so no adapter version or tenant finds KV of another. Waiting
sequences are readers of the nodes of their prefix, whether these are cached or not: many prompts
with one beginning need its nodes once. Invariant: the parent of a cached node is cached, and a node
that is neither cached nor read is not in the tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tandem.core.errors import AccountingError

TokenBlock = tuple[int, ...]


class Namespace:
    """The root of one (adapter content hash, tenant) pair. `retired` blocks are evicted first."""

    __slots__ = ("adapter", "retired", "root", "tenant")

    def __init__(self, adapter: str | None, tenant: str) -> None:
        self.adapter = adapter
        self.tenant = tenant
        self.retired = False
        self.root = Node(None, (), self)


class Node:
    """One block of a prefix, with one cached block per KV group, or none (`blocks` is empty).

    `readers` counts the waiting sequences that would use it. A root has no blocks, and counts as
    cached.
    """

    __slots__ = (
        "blocks",
        "cached_children",
        "children",
        "depth",
        "last_access",
        "namespace",
        "online",
        "parent",
        "readers",
        "tokens",
    )

    def __init__(self, parent: Node | None, tokens: TokenBlock, namespace: Namespace) -> None:
        self.parent = parent
        self.tokens = tokens
        self.namespace = namespace
        self.depth: int = 0 if parent is None else parent.depth + 1  # blocks up to its end
        self.blocks: tuple[int, ...] = ()
        self.children: dict[TokenBlock, Node] = {}
        self.cached_children = 0
        self.readers = 0
        self.online = False  # whether an online request has used the cached block
        self.last_access = 0

    @property
    def cached(self) -> bool:
        """Whether its KV, and that of all nodes above it, is in the cache."""
        return bool(self.blocks) or self.parent is None


class PrefixTree:
    """Finds, adds and removes nodes; owns no block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._namespaces: dict[tuple[str | None, str], Namespace] = {}
        self._tick = 0
        self._num_cached = 0

    def __len__(self) -> int:
        return self._num_cached

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
            if child is None or not child.blocks:
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

    def find(self, parent: Node, tokens: TokenBlock) -> Node | None:
        """The cached child with these tokens."""
        node = parent.children.get(tokens)
        return node if node is not None and node.blocks else None

    def insert(self, parent: Node, tokens: TokenBlock, blocks: tuple[int, ...]) -> Node:
        """Cache a child that is not cached yet."""
        assert parent.cached and len(tokens) == self._block_size
        node = self._child(parent, tokens)
        assert not node.blocks
        node.blocks, node.online = blocks, False
        parent.cached_children += 1
        self._num_cached += 1
        self.touch(node)
        return node

    def touch(self, node: Node) -> None:
        """Note a use. `last_access` is a counter, so replays give the same order."""
        self._tick += 1
        node.last_access = self._tick

    def remove(self, node: Node) -> None:
        """A node without cached children is no longer cached. It stays while it has readers."""
        assert node.parent is not None and node.blocks and not node.cached_children
        node.blocks = ()
        node.parent.cached_children -= 1
        self._num_cached -= 1
        if not node.readers:
            del node.parent.children[node.tokens]

    def add_reader(
        self, adapter: str | None, tenant: str, tokens: Sequence[int], limit: int
    ) -> Node:
        """Register a future reader of the first `limit` tokens; returns its last node."""
        node, size = self.root(adapter, tenant), self._block_size
        for at in range(0, limit - size + 1, size):
            node = self._child(node, tuple(tokens[at : at + size]))
            node.readers += 1
        return node

    def remove_reader(self, last: Node) -> None:
        """Remove the registration that ends at `last`."""
        node = last
        while node.parent is not None:
            node.readers -= 1
            if not (node.readers or node.blocks):
                del node.parent.children[node.tokens]
            node = node.parent

    def _child(self, parent: Node, tokens: TokenBlock) -> Node:
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens, parent.namespace)
        return node

    def namespaces_of(self, adapter: str) -> list[Namespace]:
        """All tenants' namespaces of one adapter version."""
        return [ns for (name, _), ns in self._namespaces.items() if name == adapter]

    def remove_namespace(self, namespace: Namespace) -> None:
        """Forget an empty namespace that no table or reader refers to."""
        assert not namespace.root.children
        del self._namespaces[namespace.adapter, namespace.tenant]

    def nodes(self, namespace: Namespace | None = None) -> Iterator[Node]:
        """Every cached node, or those of one namespace; children after parents."""
        roots = [namespace] if namespace is not None else list(self._namespaces.values())
        stack = [child for ns in roots for child in ns.root.children.values() if child.blocks]
        while stack:
            node = stack.pop()
            yield node
            if node.cached_children:
                stack.extend([child for child in node.children.values() if child.blocks])

    def check(self, readers: Iterable[Node]) -> None:
        """Verify links and counts, given the last node of each reader. Raises `AccountingError`."""
        if (cached := sum(1 for _ in self.nodes())) != self._num_cached:
            raise AccountingError(f"the tree counts {self._num_cached} nodes, there are {cached}")
        counted: Counter[Node] = Counter()
        for last in readers:
            node = last
            while node.parent is not None:
                counted[node] += 1
                node = node.parent
        stack = [namespace.root for namespace in self._namespaces.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            _check_node(node, counted[node])


def _check_node(node: Node, readers: int) -> None:
    children = node.children.values()
    if any(child.parent is not node or child.depth != node.depth + 1 for child in children):
        raise AccountingError("a prefix-tree node is not its parent's child")
    if node.cached_children != sum(1 for child in children if child.blocks):
        raise AccountingError("a node counts its cached children wrongly")
    if node.cached_children and not node.cached:
        raise AccountingError("a cached node has a parent that is not cached")
    if node.parent is None:
        return
    if node.readers != readers:
        raise AccountingError(f"a node counts {node.readers} readers, there are {readers}")
    if not (node.readers or node.blocks):
        raise AccountingError("a node is neither cached nor read")
