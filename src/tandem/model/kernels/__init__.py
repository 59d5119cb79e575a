"""Tandem's own CPU kernels: C++ compiled on first use, called as plain functions.

`status()` loads them (compiling at most once per machine) and says whether they can be called. If
not, callers use the torch formula. The functions run on CPU tensors, are not differentiable and
rely on `status().available`. `tandem.model.fuse` and `tandem.model.linear` add the fallback and the
gradient.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.model.kernels.compiler import BuildFailed, build, compiled

__all__ = [
    "KernelStatus",
    "amx_linear",
    "compiled",
    "forbid_tokens",
    "gelu_tanh_mul",
    "pack_panels",
    "pack_weight",
    "packed_linear",
    "paged_attention",
    "panel_linear",
    "rms_norm",
    "rotary",
    "silu_mul",
    "status",
    "unpack_panels",
    "unpack_weight",
    "write_kv",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelStatus:
    """Whether the kernels can be called; the library's file; otherwise the reason."""

    available: bool
    path: Path | None
    reason: str


@functools.cache
def status() -> KernelStatus:
    """Loads the kernels on the first call. A failure is logged once and reported here."""
    try:
        path = build()
        torch.ops.load_library(path)
    except (BuildFailed, OSError) as error:
        logger.warning("CPU kernels are not available, using torch's (slower): %s", error)
        return KernelStatus(False, None, str(error))
    return KernelStatus(True, path, "")


def paged_attention(  # noqa: PLR0913
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of any mix of spans over the paged cache; [T, H, D] in `q`'s dtype.

    `q` is [T, H, D] with any token and head stride. The caches are [blocks, block_size, KVH, D].
    Span s has the rows query_start[s]:query_start[s+1] of `q`, the last of them at position
    context_len[s] - 1, and row s of `block_table` [S, width]. The tables are contiguous int32 and
    are not checked against the cache. `window` w > 0: position p sees keys > p - w. `softcap` c >
    0: scores become c * tanh(score / c). Softmax and sums are in float32.
    """
    return torch.ops.tandem.paged_attention.default(
        q, k_cache, v_cache, block_table, query_start, context_len, scale, window, softcap
    )


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store token t of `k` and `v` [T, KVH, D] at slot slots[t] (block * block_size + offset).

    `k` and `v` may be views with any token and head stride. `slots` is int64 [T]. Raises
    RuntimeError for a slot outside the cache; nothing is written then.
    """
    torch.ops.tandem.write_kv.default(k, v, k_cache, v_cache, slots)


def rms_norm(x: Tensor, weight: Tensor, eps: float, shifted: bool = False) -> Tensor:
    """RMS norm over the last dimension of `x` (any outer strides), in float32, dense result.

    `shifted` is Gemma's form: the factor is 1 + weight and the result is rounded once.
    """
    return torch.ops.tandem.rms_norm.default(x, weight, eps, shifted)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of q [..., T, H, D] and k [..., T, KVH, D] (any outer strides).

    `cos` and `sin` are [..., T, R]; the first R dimensions are rotated, halves paired. Rounds once.
    """
    return torch.ops.tandem.rotary.default(q, k, cos, sin)


def silu_mul(x: Tensor, up: Tensor) -> Tensor:
    """silu(x) * up for two equal shapes of any outer strides; dense result."""
    return torch.ops.tandem.silu_mul.default(x, up)


def gelu_tanh_mul(x: Tensor, up: Tensor) -> Tensor:
    """gelu(x, tanh form) * up for two equal shapes of any outer strides; dense result."""
    return torch.ops.tandem.gelu_tanh_mul.default(x, up)


def forbid_tokens(scores: Tensor, words: Tensor, rows: Tensor) -> None:
    """Set scores that a mask does not allow to -inf, in place.

    `scores` is dense float32 [any, vocab]. Mask i, int32 words [masks, ceil(vocab / 32)] with a bit
    a token, is of the row rows[i], int64 [masks]. Raises RuntimeError for a row that is not there.
    """
    torch.ops.tandem.forbid_tokens.default(scores, words, rows)


def amx_linear() -> bool:
    """Whether `pack_weight`, `unpack_weight` and `packed_linear` can be called here."""
    return status().available and bool(torch.ops.tandem.amx_linear())


def pack_weight(weight: Tensor) -> Tensor:
    """A bfloat16 weight [n, k], k a multiple of 32, as panels for `packed_linear`."""
    return torch.ops.tandem.pack_weight.default(weight)


def unpack_weight(packed: Tensor, n: int) -> Tensor:
    """The weight [n, k] from which `packed` was made."""
    return torch.ops.tandem.unpack_weight.default(packed, n)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, n: int) -> Tensor:
    """x [..., k] times the packed weight [n, k] transposed; bfloat16, float32 sums.

    `bias` is float32, padded with the weight to a multiple of 32.
    """
    return torch.ops.tandem.packed_linear.default(x, packed, bias, n)


def pack_panels(weight: Tensor) -> Tensor:
    """A float32 or bfloat16 weight [n, k] as panels for `panel_linear`, in its own dtype."""
    return torch.ops.tandem.pack_panels.default(weight)


def unpack_panels(packed: Tensor, n: int, k: int) -> Tensor:
    """The weight [n, k] from which `packed` was made."""
    return torch.ops.tandem.unpack_panels.default(packed, n, k)


def panel_linear(x: Tensor, packed: Tensor, bias: Tensor | None, n: int) -> Tensor:
    """x [..., k] times the packed weight [n, k] transposed; products and sums in float32.

    `x` is float32 with a weight of either dtype, or bfloat16 with a bfloat16 one. `bias` is
    float32 [n].
    """
    return torch.ops.tandem.panel_linear.default(x, packed, bias, n)
