"""Tells glibc to keep large temporaries: it gives them back to the system after each operation.

A layer's products over some hundred rows are tens of MiB; to map and clear their pages anew each
time costs more than to compute them. Changes the whole process, once; other allocators ignore it.
"""

from __future__ import annotations

import ctypes

# malloc.h, with the values that are set: bytes below which memory comes from the heap, bytes at its
# top that are kept, bytes by which it grows.
_SETTINGS = {-3: 1 << 30, -1: (1 << 31) - 1, -2: 64 << 20}


def keep_large_blocks() -> bool:
    """Raise the thresholds of this process's malloc; False where it has none to raise."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc; Windows takes no None
        return False
    accepted = [mallopt(name, value) for name, value in _SETTINGS.items()]
    return all(accepted)
