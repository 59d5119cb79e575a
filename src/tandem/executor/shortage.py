"""Tells failures for want of memory from other failures.

Libraries say it in words only. Knows no plan. Invariant: what is taken for a shortage may succeed
when there is more memory.
"""

from __future__ import annotations

import gc
import re

from tandem.allocator import give_back
from tandem.core.plan import NO_MEMORY

# oneDNN has no more to say where it cannot allocate; what it cannot compute at all is a "primitive
# descriptor".
_SHORTAGE = re.compile(
    r"could not create a primitive(?! desc)|(?:can.?t|cannot) allocate|out of memory"
    r"|not enough memory|bad_alloc",
    re.IGNORECASE,
)


def lacks_memory(error: BaseException) -> bool:
    """Whether `error` came of a shortage of memory."""
    return isinstance(error, MemoryError) or _SHORTAGE.search(str(error)) is not None


def reason_of(error: BaseException, what: str) -> str:
    """Why `what` failed, as plans' results tell it."""
    return NO_MEMORY if lacks_memory(error) else f"{what} failed: {error}"


def relieve() -> None:
    """Give back what nobody uses, to try again with it."""
    gc.collect()
    give_back()
