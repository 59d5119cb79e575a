"""What a policy sees of KV memory: how much there is, who holds it, what is cached.

Read-only. Invariant: nothing reachable from it pins blocks or changes state.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.estimators.memory import DemandWindow
from tandem.kv.eviction import IdleBlock
from tandem.kv.holders import Apart
from tandem.kv.offline_pool import OfflinePool
from tandem.kv.queries import CacheQueries

_RANKS = {work_class: rank for rank, work_class in enumerate(WorkClass)}


class KVView:
    """Memory in blocks of `block_size` tokens. `demand` is that of online requests."""

    def __init__(self, cache: CacheQueries, demand: DemandWindow) -> None:
        self._cache, self._demand = cache, demand
        self.block_size = cache.block_size
        self.num_blocks = cache.num_blocks

    @property
    def available_blocks(self) -> int:
        """Blocks available without a preemption."""
        return self._cache.available_blocks

    def held_blocks(self, work_class: WorkClass) -> int:
        """Blocks of the running sequences of a class, without those that a class before it holds
        too. A shared block counts once."""
        return self._cache.held_by_rank[_RANKS[work_class]]

    @property
    def online_demand_blocks(self) -> float:
        """Blocks to leave to online requests: the larger of what they hold now and mu + 2 sigma
        of what they held in the last hour (Echo 5.3). A shared block counts once."""
        return max(float(self.held_blocks(WorkClass.ONLINE)), self._demand.demand)

    def blocks_of(self, sequences: Iterable[Sequence]) -> int:
        """Blocks of these running sequences; a shared block counts once for each."""
        return self._cache.holders.held_by(sequences)

    def blocks_apart(self, sequences: Iterable[Sequence]) -> Apart:
        """Which blocks each of these running sequences holds alone, and how many of them several of
        these hold."""
        return self._cache.holders.apart(sequences)

    def idle_blocks(self) -> list[IdleBlock]:
        """Cached blocks that no sequence holds, with their future readers. Costs O(blocks)."""
        return self._cache.idle_blocks()

    @property
    def offline_pool(self) -> OfflinePool:
        """The offline sequences that wait, by length and cached prefix: the cache's own, not to be
        changed."""
        return self._cache.offline

    def new_blocks(self, seq: Sequence, num_tokens: int, ranks: int = len(WorkClass)) -> int:
        """Blocks that a waiting sequence of so many tokens needs beside those that others hold;
        `ranks`: others of lower ranks (`Sequence.order`) only."""
        return self._cache.new_blocks(seq, num_tokens, ranks)

    def wanted_evictions(self, num_blocks: int) -> float:
        """Blocks with future readers that have to go for so many new ones."""
        return self._cache.wanted_evictions(num_blocks)

    def match(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence whose KV is cached now. Pins nothing."""
        return self._cache.match(seq)
