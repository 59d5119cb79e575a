"""Rows of a study as JSON lines: written one by one, so that a study goes on where it ended.

Knows no study. Invariant: a row is written whole or, where the process is killed, left out when it
is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def append(path: Path, row: Row) -> None:
    """Add one row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and not path.read_bytes().endswith((b"", b"\n")[path.stat().st_size > 0])
    with path.open("a") as file:
        file.write("\n" * cut + json.dumps(row, ensure_ascii=False) + "\n")


def read(path: Path) -> list[Row]:
    """All rows in order; none where there is no file."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().split("\n"):  # answers may have other ends of lines
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
