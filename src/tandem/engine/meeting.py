"""The directory in which a server and its engine find each other's sockets.

A killed process leaves its directory behind; the next process that makes its own removes it. A
directory belongs to the process that locks the file in it. Knows no socket. Invariant: the
directory of a live process is never removed, whichever container that process runs in.
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
    """A new directory for this process, removed at the end. Blocks."""
    remove_dead(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as made:
        folder = Path(made)
        # The file gets its name only once it is locked, so no process sees a live one unlocked.
        aside = folder / f"{_LOCK}.new"
        with aside.open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            aside.rename(folder / _LOCK)
            yield folder


def remove_dead(parent: Path) -> list[Path]:
    """Remove such directories of this user whose process has ended; returns them. Blocks."""
    removed: list[Path] = []
    for folder in sorted(parent.glob(f"{_PREFIX}*")):
        try:
            if folder.stat().st_uid == os.getuid() and _is_dead(folder / _LOCK):
                shutil.rmtree(folder)
                removed.append(folder)
        except OSError:
            continue  # its owner, or another process, was faster
    return removed


def _is_dead(lock: Path) -> bool:
    """Whether no process holds the lock. Raises `OSError` if there is no lock file (yet)."""
    with lock.open("r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
