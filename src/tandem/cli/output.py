"""What commands write at their end, and how they end when they cannot."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from tandem.core.errors import InvalidRequest, TandemError, UnsupportedModel


def with_folder(out: Path | None) -> Path | None:
    """The callback of an option that names a file to be written: its folder is made and the file
    tried at once, so that nothing is measured in vain. Raises `typer.BadParameter`."""
    if out is None:
        return None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot make the folder {out.parent}: {error.strerror}"
        ) from error
    if out.is_dir():
        raise typer.BadParameter(f"{out} is a folder")
    try:
        check_writable(out)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {out}: {error.strerror}") from error
    return out


def check_writable(path: Path) -> None:
    """Open a file for writing and leave it as it was. A pipe or a device is not opened, since that
    may wait. Raises `OSError`."""
    new = not path.exists()
    if new or path.is_file() or path.is_dir():
        with path.open("ab"):
            pass
    if new:
        path.resolve().unlink()  # a link to it stays


@contextmanager
def refusals() -> Iterator[None]:
    """Our own errors as one line on stderr; exit status 2 if what was asked for cannot be done, as
    with a wrong option or a model that is not supported, else 1. So are a name that is too long (2)
    and a file that cannot be read or written (1)."""
    try:
        yield
    except TandemError as error:
        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        wrong = isinstance(error, InvalidRequest | UnsupportedModel)
        raise typer.Exit(2 if wrong else 1) from error
    except OSError as error:
        # `Path.exists` does not take a name that is too long for absent.
        too_long = error.errno == errno.ENAMETOOLONG
        if error.filename is None and not too_long:
            raise
        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        raise typer.Exit(2 if too_long else 1) from error
