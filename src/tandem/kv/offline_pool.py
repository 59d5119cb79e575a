"""Offline requests that wait, by prompt length and prefix: which of them finds most in the cache.

A bucket has the prompts of one length, to a factor of two, as a tree (Echo, section 6). It counts
its prompts at each node of the prefix tree and keeps the cached nodes by depth. So the request with
the longest cached prefix is found without a walk over the pool. Chooses nothing. Invariant: every
cached node with a prompt of a bucket is in that bucket's heap.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter

from msgspec import Struct

from tandem.core.errors import AccountingError
from tandem.core.sequence import Sequence
from tandem.kv.prefix_tree import Node

# Most cached nodes that are looked at for the sequences of one bucket: long prompts have many.
_MOST_NODES = 64
_arrival: Callable[[Sequence], tuple[int, float, int]] = attrgetter("order")


class Offered(Struct, frozen=True, gc=False):
    """A waiting offline sequence, and how many of its tokens were found to be cached."""

    seq: Sequence
    cached_tokens: int


class _Bucket:
    """Sequences of about one length."""

    def __init__(self) -> None:
        self.by_arrival: list[Sequence] = []
        self.counts: dict[Node, int] = {}  # sequences at or below a node
        self.children: dict[Node, dict[Node, None]] = {}  # those of a node with sequences
        self.ends: dict[Node, dict[int, Sequence]] = {}  # sequences whose last node it is
        self._deepest: list[tuple[int, int, Node]] = []
        self._pushes = 0

    def count(self, node: Node) -> None:
        """One more sequence at or below a node."""
        self.counts[node] = self.counts.get(node, 0) + 1
        if self.counts[node] > 1 or node.parent is None:
            return
        self.children.setdefault(node.parent, {})[node] = None
        if node.blocks:
            self.push(node)

    def uncount(self, node: Node) -> None:
        """One fewer."""
        self.counts[node] -= 1
        if self.counts[node] or node.parent is None:
            return
        del self.counts[node]
        siblings = self.children[node.parent]
        del siblings[node]
        if not siblings:
            del self.children[node.parent]

    def push(self, node: Node) -> None:
        """A node with sequences became cached, or a cached node got its first sequence."""
        if len(self._deepest) > 64 + 2 * len(self.counts):  # most entries are stale
            cached = [each for each in self.counts if each.blocks]
            self._deepest = [(-each.depth, place, each) for place, each in enumerate(cached)]
            heapq.heapify(self._deepest)
            self._pushes = len(cached)
        self._pushes += 1
        heapq.heappush(self._deepest, (-node.depth, self._pushes, node))

    def best(self, most: int) -> list[tuple[Sequence, int]]:
        """Up to `most` sequences: those with the longest cached prefixes, and their blocks; then
        those that came first, as if nothing of them was cached. The bucket is not empty."""
        found: dict[int, tuple[Sequence, int]] = {}
        valid: dict[Node, tuple[int, int, Node]] = {}
        known: Counter[Node] = Counter()  # sequences below a node that were found
        while self._deepest and len(found) < most and len(valid) < _MOST_NODES:
            entry = heapq.heappop(self._deepest)
            node = entry[2]
            if not node.blocks or node not in self.counts or node in valid:
                continue
            valid[node] = entry
            if known[node] < self.counts[node]:
                for seq in self._below(node, most):
                    found.setdefault(seq.seq_id, (seq, node.depth))
            if node.parent is not None:
                known[node.parent] += self.counts[node]
        for entry in valid.values():
            heapq.heappush(self._deepest, entry)
        for seq in self.by_arrival[:most]:
            found.setdefault(seq.seq_id, (seq, 0))
        return list(found.values())[:most]

    def _below(self, node: Node, most: int) -> list[Sequence]:
        found: list[Sequence] = []
        nodes = [node]
        while nodes and len(found) < most:
            node = nodes.pop()
            found += sorted(self.ends.get(node, {}).values(), key=_arrival)
            nodes += reversed(self.children.get(node, {}))
        return found[:most]


class OfflinePool:
    """All waiting offline sequences, as `KVCache` hears of them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._buckets: dict[int, _Bucket] = {}
        self._places: dict[int, tuple[int, Node | None]] = {}  # seq_id: bucket, last node

    def __len__(self) -> int:
        return len(self._places)

    def best_of_buckets(self, most: int = 1) -> Iterator[Offered]:
        """Of each bucket that has any, shortest prompts first: up to `most` of the sequences with
        the longest cached prefixes, then those that came first."""
        for length in sorted(self._buckets):
            for seq, blocks in self._buckets[length].best(most):
                yield Offered(seq, blocks * self._block_size)

    def add(self, seq: Sequence, last: Node | None) -> None:
        """A sequence waits; `last` is the last node of its prefix (None: it may not be shared). One
        that is here already stays as it is."""
        if seq.seq_id in self._places:
            return
        length = len(seq.tokens).bit_length()
        bucket = self._buckets.setdefault(length, _Bucket())
        self._places[seq.seq_id] = length, last
        insort(bucket.by_arrival, seq, key=_arrival)
        if last is None:
            return
        bucket.ends.setdefault(last, {})[seq.seq_id] = seq
        node = last
        while node.parent is not None:
            bucket.count(node)
            node = node.parent

    def remove(self, seq: Sequence) -> None:
        """A sequence no longer waits. Idempotent."""
        place = self._places.pop(seq.seq_id, None)
        if place is None:
            return
        length, last = place
        bucket = self._buckets[length]
        del bucket.by_arrival[bisect_left(bucket.by_arrival, seq.order, key=_arrival)]
        if not bucket.by_arrival:
            del self._buckets[length]
            return
        if last is None:
            return
        del bucket.ends[last][seq.seq_id]
        if not bucket.ends[last]:
            del bucket.ends[last]
        node = last
        while node.parent is not None:
            bucket.uncount(node)
            node = node.parent

    def note_cached(self, node: Node) -> None:
        """A node that has readers was cached."""
        for bucket in self._buckets.values():
            if node in bucket.counts:
                bucket.push(node)

    def check(self) -> None:
        """Compare what each bucket says with a walk over it. Raises `AccountingError`."""
        if len(self._places) != sum(len(each.by_arrival) for each in self._buckets.values()):
            raise AccountingError("a waiting offline request is in no bucket, or in two")
        for bucket in self._buckets.values():
            counted: Counter[Node] = Counter()
            for last, sequences in bucket.ends.items():
                node = last
                while node.parent is not None:
                    counted[node] += len(sequences)
                    node = node.parent
            if counted != bucket.counts or counted.keys() != {
                child for children in bucket.children.values() for child in children
            }:
                raise AccountingError("a bucket of waiting offline requests is counted wrongly")
            most = max([node.depth for node in counted if node.blocks], default=0)
            [(offered, blocks)] = bucket.best(1)
            if blocks != most or offered not in bucket.by_arrival:
                raise AccountingError(f"a bucket offers {blocks} cached blocks, it has {most}")
