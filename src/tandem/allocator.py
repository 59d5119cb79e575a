"""Settings of glibc's malloc for the two kinds of processes; other allocators ignore them.

They hold for the whole process, from then on. Knows nothing of what is allocated.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3), as in malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8


def keep_large_blocks() -> bool:
    """For a process that computes: do not give large temporaries back after each operation.

    A layer's products over some hundred rows are tens of MiB; to map and clear their pages anew
    each time takes longer than to compute them. False where there is no glibc.
    """
    return _set({_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 64 << 20})


def share_one_arena() -> bool:
    """For a process that runs Python in many threads: let them all allocate from one heap.

    Each heap keeps the most that it ever held, and threads that take turns at the interpreter gain
    nothing from heaps of their own. To be called before they start. False where there is no glibc.
    """
    return _set({_ARENA_MAX: 1})


def _set(parameters: dict[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc; Windows takes no None
        return False
    accepted = [mallopt(name, value) for name, value in parameters.items()]
    return all(accepted)
