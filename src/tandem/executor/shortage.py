"""Distinguishes failures for lack of memory from other failures.

Libraries report them by message only. Knows no plan. Invariant: a failure that counts as a shortage
may succeed when there is more memory.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.allocator import give_back
from tandem.core.errors import NoMemory, OutOfMemory
from tandem.core.plan import NO_MEMORY

# oneDNN's message for a failed allocation. A computation that it does not support at all is
# reported as "primitive descriptor".
_SHORTAGE = re.compile(
    r"could not create a primitive(?! desc)|(?:can.?t|cannot) allocate|out of memory"
    r"|not enough memory|bad_alloc",
    re.IGNORECASE,
)


def lacks_memory(error: BaseException) -> bool:
    """Whether `error` was caused by a shortage of memory."""
    return isinstance(error, MemoryError) or _SHORTAGE.search(str(error)) is not None


def reason_of(error: BaseException, what: str) -> str:
    """Why `what` failed, as results report it."""
    return NO_MEMORY if lacks_memory(error) else f"{what} failed: {error}"


def relieve() -> None:
    """Release unused memory, to try again with it."""
    gc.collect()
    give_back()


@contextmanager
def shortage_told(what: str) -> Iterator[None]:
    """A shortage of memory inside becomes `NoMemory`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if lacks_memory(error):
            raise NoMemory(f"there is no memory for {what} now") from error
        raise


@contextmanager
def shortage_raised() -> Iterator[None]:
    """A shortage of memory inside becomes `OutOfMemory`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        relieve()
        raise OutOfMemory(NO_MEMORY) from error
