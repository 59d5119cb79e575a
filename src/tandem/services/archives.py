"""PEFT directories as they come in and go out: copied, or as zips.

Of a zip only the two files of an adapter are read, wherever in it they lie. Invariant: what these
write was flushed before they return, and nothing outside of `target` is written.
"""

from __future__ import annotations

import lzma
import os
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO

from tandem.adapters.files import CONFIG_NAME, WEIGHTS_NAME, inspect_adapter
from tandem.core.errors import AdapterError

EXPORTS = "exports"
"""The folder in the store's directory where zips are while they are sent."""

_MOST_IMPORT_BYTES = 16 << 30
# What zipfile raises for damaged, encrypted or unknown content; RuntimeError is its "encrypted",
# and the parent of its "unknown compression".
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
)


def copy(source: Path, target: Path) -> None:
    """Copy an adapter. Raises `AdapterError`. Blocks."""
    inspect_adapter(source)
    target.mkdir()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        with (source / name).open("rb") as stream:
            _write(stream, target / name)


def unpack(archive: Path, target: Path) -> None:
    """Take an adapter out of a zip. Raises `AdapterError`. Blocks."""
    try:
        with zipfile.ZipFile(archive) as packed:
            members = {Path(info.filename).name: info for info in packed.infolist()}
            target.mkdir()
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                if name not in members:
                    raise AdapterError(f"the archive has no {name}", param="file_id")
                if members[name].file_size > _MOST_IMPORT_BYTES:
                    raise AdapterError(f"{name} in the archive is too large", param="file_id")
                with packed.open(members[name]) as stream:
                    _write(stream, target / name)
    except _UNREADABLE as error:
        raise AdapterError(f"cannot read the archive: {error}", param="file_id") from error


def _write(stream: IO[bytes], target: Path) -> None:
    with target.open("wb") as file:
        shutil.copyfileobj(stream, file)
        file.flush()
        os.fsync(file.fileno())


def pack(directory: Path, folder: Path) -> Path:
    """A zip in `folder` of the adapter in `directory`, to be removed by the caller. Blocks.

    Raises `FileNotFoundError` if the adapter's files are gone.
    """
    folder.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".zip", delete=False) as file:
        path = Path(file.name)
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                packed.write(directory / name, name)
    except BaseException:
        path.unlink()
        raise
    return path
