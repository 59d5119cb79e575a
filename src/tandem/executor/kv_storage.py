"""The KV tensors of all layers. Does not know which block belongs to whom.

Invariant: the tensors never move or change size, so views of them stay valid.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from tandem.config import CacheConfig, SchedulingConfig
from tandem.core.errors import InvalidRequest
from tandem.core.plan import BlockCopy
from tandem.model.attention.base import LayerKV, LayerShape
from tandem.model.load import LoadedModel
from tandem.model.transfer import indices

# Share of free memory that the cache may take. The rest is for activations and other processes.
_CPU_SHARE = 0.25
_CUDA_SHARE = 0.85
# Limits for a small model on a large machine: most of a large cache would never be read again.
_LEAST_BOUND = 512 << 20
_MOST_WEIGHTS = 16


class KVStorage:
    """Keys and values per layer, each [num_blocks, block_size, kv_heads, head_dim]."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: list[LayerKV] = []
        for shape in shapes:
            size = (num_blocks, block_size, shape.kv_heads, shape.head_dim)
            self.layers.append(
                LayerKV(lazy_zeros(size, device, dtype), lazy_zeros(size, device, dtype))
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, written or not."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, all reads before all writes."""
        if not copies:
            return
        device = self.layers[0].keys.device
        sources = indices([copy.source for copy in copies], device)
        targets = indices([copy.target for copy in copies], device)
        for layer in self.layers:
            for store in (layer.keys, layer.values):
                store.index_copy_(0, targets, store.index_select(0, sources))

    def scrub(self, blocks: Sequence[int]) -> None:
        """Set values that are not finite to zero, so that the next owner of the block is safe."""
        where = indices(sorted(set(blocks)), self.layers[0].keys.device)
        for layer in self.layers:
            for store in (layer.keys, layer.values):
                clean = store.index_select(0, where).nan_to_num_(0.0, 0.0, 0.0)
                store.index_copy_(0, where, clean)


def lazy_zeros(size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros, because a masked position still multiplies the stored value by zero.

    On a CPU the system provides the pages when they are first written. A cache that is never filled
    costs no memory. Large pages, where available, cause fewer TLB misses.
    """
    if device.type != "cpu":
        return torch.zeros(size, device=device, dtype=dtype)
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize)
    if sys.platform == "linux":
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(size)


def block_bytes(model: LoadedModel, block_size: int) -> int:
    """Bytes of one block over all layers."""
    numbers = sum(2 * shape.kv_heads * shape.head_dim for shape in model.layers)
    return numbers * block_size * model.dtype.itemsize


def choose_num_blocks(model: LoadedModel, cache: CacheConfig, scheduling: SchedulingConfig) -> int:
    """Number of blocks of the cache: from the configured memory, or from a share of free memory.

    It is never more than all sequences could use at full length. Raises `InvalidRequest` if not
    even one block fits.
    """
    each = block_bytes(model, cache.block_size)
    useful = scheduling.max_sequences * -(-model.max_model_len // cache.block_size)
    memory = cache.memory_bytes or _default_bytes(model.device, model.weight_bytes)
    count = min(memory // each, useful)
    if count < 1:
        raise InvalidRequest(
            f"{memory} bytes hold no block of the KV cache ({each} bytes each); raise "
            "cache.memory_bytes",
            param="memory_bytes",
        )
    return int(count)


def _default_bytes(device: torch.device, weight_bytes: int) -> int:
    """A share of free memory. On a CPU at most 512 MiB, or 16 times the weights if that is more."""
    if device.type == "cuda":
        return int(free_memory_bytes(device) * _CUDA_SHARE)
    share = int(free_memory_bytes(device) * _CPU_SHARE)
    return min(share, max(_LEAST_BOUND, _MOST_WEIGHTS * weight_bytes))


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that this process may still take on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(min(psutil.virtual_memory().available, _container_free()))


def _container_free() -> int:
    """Bytes that the control group of this process still allows."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    return max(int(limit) - used, 0) if limit != "max" else 1 << 62
