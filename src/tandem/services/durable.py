"""Directories whose names survive a power cut, and small files that are never seen in half.

A file system flushes a new name only with the directory that holds it. Knows nothing of what they
are for. Invariant: when a function for directories returns, the entries are on disk.
"""

from __future__ import annotations

import os
import uuid
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


def replace_text(path: Path, text: str) -> None:
    """Write a small file, not flushed: whoever reads sees all of the old text or all of the new,
    however many write at once. Blocks."""
    aside = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
