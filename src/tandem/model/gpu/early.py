"""Whether a kernel may be placed on the device before the one before it ends.

Hopper and later devices have programmatic dependent launch: a kernel starts while its predecessor
drains, and waits (`gdc_wait`) before it touches anything that another kernel writes. Invariant: a
kernel launched with `early_start` waits in every program, so that it ends after its predecessor.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def after_predecessor(EARLY: tl.constexpr) -> None:
    """Let the next kernel start, and wait for the one before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def ask(address, size) -> None:  # type: ignore[no-untyped-def]
    """Bring `size` bytes from `address` on into the second cache; int64 and int32 tensors.

    Both are multiples of 16. Nothing is asked for where the size is not positive. A tensor should
    have as many elements as a program has threads, since several threads ask for one element else.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.gt.s32 wanted, $2, 0;
        @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def early_start(device: torch.device) -> dict[str, Any]:
    """What to launch such a kernel with: its `EARLY` and the launch's attribute."""
    return {"EARLY": True, "launch_pdl": True} if _starts_early(device) else {"EARLY": False}


@functools.cache
def _starts_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER
