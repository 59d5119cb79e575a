"""Offline requests that wait, by prompt length and prefix: which of them finds most in the cache.

A bucket has the prompts of one length, to a factor of two, as a tree (Echo, section 6). It counts
its prompts at each node of the prefix tree and keeps the cached nodes by depth. So the request with
the longest cached prefix is found without a walk over the pool. Chooses nothing. Invariant: every
cached node with a prompt of a bucket is in that bucket's heap.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from tandem.core.errors import AccountingError
from tandem.core.sequence import Sequence
from tandem.kv.prefix_tree import Node


class Offered(Struct, frozen=True, gc=False):
    """A waiting offline sequence, and how many of its tokens are cached."""

    seq: Sequence
    cached_tokens: int


class _Bucket:
    """Sequences of about one length."""

    def __init__(self) -> None:
        self.oldest: dict[int, Sequence] = {}  # all of them by `seq_id`, oldest entry first
        self.counts: dict[Node, int] = {}  # sequences at or below a node
        self.ends: dict[Node, dict[int, Sequence]] = {}  # sequences whose last node it is
        self._deepest: list[tuple[int, int, Node]] = []
        self._pushes = 0

    def push(self, node: Node) -> None:
        """A node with sequences became cached, or a cached node got its first sequence."""
        if len(self._deepest) > 64 + 2 * len(self.counts):  # most entries are stale
            cached = [each for each in self.counts if each.blocks]
            self._deepest = [(-each.depth, place, each) for place, each in enumerate(cached)]
            heapq.heapify(self._deepest)
            self._pushes = len(cached)
        self._pushes += 1
        heapq.heappush(self._deepest, (-node.depth, self._pushes, node))

    def best(self) -> tuple[Sequence, int]:
        """The sequence with the longest cached prefix, else the oldest; and that prefix's blocks.

        The bucket is not empty.
        """
        while self._deepest:
            node = self._deepest[0][2]
            if node.blocks and node in self.counts:
                return self._below(node), node.depth
            heapq.heappop(self._deepest)
        return next(iter(self.oldest.values())), 0

    def _below(self, node: Node) -> Sequence:
        while node not in self.ends:
            node = next(child for child in node.children.values() if child in self.counts)
        return next(iter(self.ends[node].values()))


class OfflinePool:
    """All waiting offline sequences, as `KVCache` hears of them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._buckets: dict[int, _Bucket] = {}
        self._places: dict[int, tuple[int, Node | None]] = {}  # seq_id: bucket, last node

    def __len__(self) -> int:
        return len(self._places)

    def best_of_buckets(self) -> Iterator[Offered]:
        """Of each bucket that has any, shortest prompts first: the sequence with the longest cached
        prefix, else its oldest."""
        for length in sorted(self._buckets):
            seq, blocks = self._buckets[length].best()
            yield Offered(seq, blocks * self._block_size)

    def add(self, seq: Sequence, last: Node | None) -> None:
        """A sequence waits; `last` is the last node of its prefix (None: it may not be shared).
        Idempotent."""
        if seq.seq_id in self._places:
            return
        length = len(seq.tokens).bit_length()
        bucket = self._buckets.setdefault(length, _Bucket())
        self._places[seq.seq_id] = length, last
        bucket.oldest[seq.seq_id] = seq
        if last is None:
            return
        bucket.ends.setdefault(last, {})[seq.seq_id] = seq
        node, counts = last, bucket.counts
        while node.parent is not None:
            counts[node] = counts.get(node, 0) + 1
            if counts[node] == 1 and node.blocks:
                bucket.push(node)
            node = node.parent

    def remove(self, seq_id: int) -> None:
        """A sequence no longer waits. Idempotent."""
        place = self._places.pop(seq_id, None)
        if place is None:
            return
        length, last = place
        bucket = self._buckets[length]
        del bucket.oldest[seq_id]
        if not bucket.oldest:
            del self._buckets[length]
            return
        if last is None:
            return
        del bucket.ends[last][seq_id]
        if not bucket.ends[last]:
            del bucket.ends[last]
        node, counts = last, bucket.counts
        while node.parent is not None:
            counts[node] -= 1
            if not counts[node]:
                del counts[node]
            node = node.parent

    def note_cached(self, node: Node) -> None:
        """A node that has readers was cached."""
        for bucket in self._buckets.values():
            if node in bucket.counts:
                bucket.push(node)

    def check(self) -> None:
        """Compare what each bucket says with a walk over it. Raises `AccountingError`."""
        for bucket in self._buckets.values():
            counted: Counter[Node] = Counter()
            for last, sequences in bucket.ends.items():
                node = last
                while node.parent is not None:
                    counted[node] += len(sequences)
                    node = node.parent
            if counted != bucket.counts:
                raise AccountingError("a bucket of waiting offline requests is counted wrongly")
            most = max([node.depth for node in counted if node.blocks], default=0)
            seq, blocks = bucket.best()
            if blocks != most or seq.seq_id not in bucket.oldest:
                raise AccountingError(f"a bucket offers {blocks} cached blocks, it has {most}")
