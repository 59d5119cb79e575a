"""The directory in which a server and its engine find each other's sockets.

A process that is killed leaves its directory behind; the next one that makes its own removes it.
A directory belongs to whoever holds the lock on the file in it. Knows no socket. Invariant: the
directory of a process that lives is never removed, whichever container it runs in.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "tandem-sockets-"
_LOCK = "lock"


@contextlib.contextmanager
def meeting_place() -> Iterator[Path]:
    """A new directory of this process, removed at the end. Blocks."""
    remove_dead(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as made:
        folder = Path(made)
        # Nobody takes the lock of what lives: the file has its name only once it is locked.
        aside = folder / f"{_LOCK}.new"
        with aside.open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            aside.rename(folder / _LOCK)
            yield folder


def remove_dead(parent: Path) -> list[Path]:
    """Remove such directories of this user whose process has ended; which ones. Blocks."""
    removed: list[Path] = []
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        try:
            if folder.stat().st_uid == os.getuid() and _is_dead(folder / _LOCK):
                shutil.rmtree(folder)
                removed.append(folder)
        except OSError:
            continue  # its owner, or another start, was faster
    return removed


def _is_dead(lock: Path) -> bool:
    """Whether nobody holds the lock. Raises `OSError` where there is none (yet)."""
    with lock.open("r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
