"""Directories whose names survive a power cut.

A file system flushes a new name only with the directory that holds it. Knows nothing of what the
directories are for. Invariant: when these return, the entries are on disk.
"""

from __future__ import annotations

import os
from pathlib import Path


def make_directory(path: Path) -> None:
    """Make a directory with its parents, each flushed into the one that holds it. Blocks."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    flush_directory(path.parent)


def flush_directory(path: Path) -> None:
    """Flush a directory's entries to disk. Blocks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
