"""Files that commands write at their end."""

from __future__ import annotations

from pathlib import Path

import typer


def with_folder(out: Path | None) -> Path | None:
    """The callback of an option that names a file to be written: its folder is made at once, so
    that nothing is measured in vain. Raises `typer.BadParameter`."""
    if out is None:
        return None
    if out.is_dir():
        raise typer.BadParameter(f"{out} is a folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot make the folder {out.parent}: {error.strerror}"
        ) from error
    return out
