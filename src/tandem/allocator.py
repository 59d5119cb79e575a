"""Settings of glibc's malloc for the two kinds of processes; other allocators ignore them.

They hold for the whole process, from then on. Knows nothing of what is allocated.
"""

from __future__ import annotations

import ctypes
import threading
import time

# Parameters of mallopt(3), as in malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8


class _Heaps(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


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


def give_back() -> bool:
    """Return whole pages that nobody uses to the system, wherever in the heap they lie.

    False where there is no glibc. Takes milliseconds for some hundred MiB, in which threads that
    allocate wait.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return False
    return True


def free_bytes() -> int:
    """Bytes that the heaps keep although nobody uses them. 0 where glibc does not say."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return 0
    mallinfo2.restype = _Heaps
    return int(mallinfo2().fordblks)


def give_back_regularly(period_s: float = 30.0, kept_bytes: int = 0) -> threading.Thread | None:
    """`give_back` in a thread of its own, which ends with the process; None where it cannot.

    For a process that answers requests for days: what they leave between blocks that live longer
    would add up, although nothing is lost. Up to `kept_bytes` of free memory stay.
    """
    if not give_back():
        return None

    def repeat() -> None:
        while True:
            time.sleep(period_s)
            if not kept_bytes or free_bytes() > kept_bytes:
                give_back()

    thread = threading.Thread(target=repeat, name="give back memory", daemon=True)
    thread.start()
    return thread


def _set(parameters: dict[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc; Windows takes no None
        return False
    accepted = [mallopt(name, value) for name, value in parameters.items()]
    return all(accepted)
