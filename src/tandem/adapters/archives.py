"""PEFT directories as they come in and go out: copied, or as zips.

Of a zip only the two files of an adapter are read, wherever in it they lie, up to a bound. It may
hold one adapter.
Invariant: what these write was flushed before they return, and nothing outside of `target` is
written.
"""

from __future__ import annotations

import io
import lzma
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tandem.adapters.configuration import MOST_CONFIG_BYTES
from tandem.adapters.files import CONFIG_NAME, WEIGHTS_NAME, inspect_adapter
from tandem.core.errors import AdapterError, DiskError, NotFound

EXPORTS = "exports"
"""The folder in the store's directory where zips are while they are sent."""

_MOST_LISTING_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 20
# What zipfile raises for damaged, encrypted or unknown content; RuntimeError is its "encrypted",
# and the parent of its "unknown compression".
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OverflowError,
    RuntimeError,
    ValueError,
)


def copy(source: Path, target: Path) -> None:
    """Copy an adapter. Raises `AdapterError`, `DiskError`. Blocks."""
    inspect_adapter(source)
    target.mkdir()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        with (source / name).open("rb") as stream:
            _write(stream, target / name)


def unpack(archive: Path, target: Path, most_bytes: int) -> None:
    """Take an adapter out of a zip; its weights may have `most_bytes`. Raises `AdapterError`, and
    `DiskError` if the disk does not take it. Blocks."""
    bounds = {CONFIG_NAME: MOST_CONFIG_BYTES, WEIGHTS_NAME: most_bytes}
    try:
        with archive.open("rb") as file, zipfile.ZipFile(_Listing(file)) as packed:
            members = {name: _member(packed, name) for name in (CONFIG_NAME, WEIGHTS_NAME)}
            target.mkdir()
            for name, member in members.items():
                with packed.open(member) as stream:
                    _write(stream, target / name, bounds[name])
    except OSError as error:
        reason = f"cannot read the archive: {error.strerror}"
        raise AdapterError(reason, param="file_id") from error
    except _UNREADABLE as error:
        raise AdapterError(f"cannot read the archive: {error}", param="file_id") from error


def _member(packed: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    found = [info for info in packed.infolist() if Path(info.filename).name == name]
    if not found:
        raise AdapterError(f"the archive has no {name}", param="file_id")
    if len(found) > 1:
        told = f"the archive has {len(found)} files {name}; pack one adapter alone"
        raise AdapterError(told, param="file_id")
    return found[0]


class _Listing(io.BufferedIOBase):
    """A file in which a zip's list of contents is bounded: `zipfile` reads it at once and makes an
    object of each entry."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int | None = -1, /) -> bytes:
        """Read `size` bytes; raises `AdapterError` for more than a list of contents needs."""
        if size is None or size < 0:
            here = self._file.tell()
            size = self._file.seek(0, os.SEEK_END) - here
            self._file.seek(here)
        if size > _MOST_LISTING_BYTES:
            raise AdapterError("the archive lists too many files", param="file_id")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a place."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """The place."""
        return self._file.tell()

    def seekable(self) -> bool:
        """It is."""
        return True


def _write(stream: IO[bytes], target: Path, most_bytes: int | None = None) -> None:
    size_bytes = 0
    with target.open("wb") as file:
        while chunk := stream.read(_CHUNK_BYTES):
            size_bytes += len(chunk)
            if most_bytes is not None and size_bytes > most_bytes:
                raise AdapterError(
                    f"{target.name} in the archive has more than {most_bytes} bytes (--max-file)",
                    param="file_id",
                )
            with _writing():
                file.write(chunk)
        with _writing():
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def _writing() -> Iterator[None]:
    """What the disk refuses inside becomes `DiskError`."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"cannot write the adapter: {error.strerror}") from error


def pack(directory: Path, folder: Path) -> Path:
    """A zip in `folder` of the adapter in `directory`, to be removed by the caller. Raises
    `NotFound` if its files are gone. Blocks."""
    folder.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".zip", delete=False) as file:
        path = Path(file.name)
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                packed.write(directory / name, name)
    except FileNotFoundError as error:
        path.unlink()
        gone = "the files of this version are gone from this server's directory"
        raise NotFound(gone, param="version", code="file_gone") from error
    except BaseException:
        path.unlink()
        raise
    return path
