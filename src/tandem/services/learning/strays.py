"""Directories of versions and checkpoints that no row names.

A crash between a rename and its commit leaves one, and so does an engine that dies while it writes.
Knows neither store nor engine. Invariant: what a row names is never touched.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Set as AbstractSet
from pathlib import Path

from tandem.services.durable import make_directory

logger = logging.getLogger(__name__)


def remove_strays(folder: Path, known: AbstractSet[str]) -> list[str]:
    """Remove the directories in `folder`, that of one adapter or job, that are not `known`; which
    ones. Nobody may be writing there. What cannot be removed is no reason to stop. Blocks."""
    removed: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if str(path) in known or not path.is_dir():
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            logger.error("%s cannot be removed", path, exc_info=error)
        else:
            removed.append(str(path))
    return removed


def make_room(path: Path, aside: Path) -> None:
    """Let nothing be where a checkpoint is to be written, first `aside`. Blocks."""
    make_directory(path.parent)
    shutil.rmtree(path, ignore_errors=True)
    remove_staged(aside)


def remove_staged(aside: Path) -> None:
    """Remove what was staged there, also what an engine that died had half written. Blocks."""
    for old in (aside, *aside.parent.glob(f".{aside.name}.*")):
        shutil.rmtree(old, ignore_errors=True)
