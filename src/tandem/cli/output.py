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
    """The callback of an option that names a file to be written: its folder is made at once, so
    that nothing is measured in vain. Raises `typer.BadParameter`."""
    if out is None:
        return None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            raise typer.BadParameter(f"{out} is a folder")
    except OSError as error:
        raise typer.BadParameter(
            f"cannot make the folder {out.parent}: {error.strerror}"
        ) from error
    return out


@contextmanager
def refusals() -> Iterator[None]:
    """Our own errors as one line on stderr; exit status 2 if what was asked for cannot be done, as
    with a wrong option or a model that is not supported, else 1. So is a name that is too long."""
    try:
        yield
    except TandemError as error:
        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        wrong = isinstance(error, InvalidRequest | UnsupportedModel)
        raise typer.Exit(2 if wrong else 1) from error
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # which `Path.exists` does not take for absent
            raise
        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        raise typer.Exit(2) from error
