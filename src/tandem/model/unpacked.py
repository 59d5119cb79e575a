"""GGUF files, unpacked once on this machine into a folder of checkpoints.

A checkpoint's name is made from the file's content and the reader's version. A file is therefore
found again under any name, and never goes stale. Knows nothing of the content. Invariant: a folder
without a dot is complete. It is written under another name, flushed, and renamed under a lock that
ends with its process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from tandem.core.errors import InvalidRequest, NotFound, UnsupportedModel

Progress = Callable[[str, float], None]

_MAGIC = b"GGUF"
_PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$")
_PARTIAL = ".partial-"
# Changes when the content written for the same file changes.
_FORMAT = 3
# Tokenizer and configurations beside the weights.
_ROOM_BYTES = 64 * 2**20


def model_folder() -> Path:
    """Where checkpoints are kept: `TANDEM_MODEL_CACHE`, else the user's cache folder."""
    if chosen := os.environ.get("TANDEM_MODEL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "models"


def unpacked(file: Path, progress: Progress) -> Path:
    """The checkpoint of a GGUF file. Unpacks it first (some seconds) unless it exists.

    Raises `NotFound` without the file, `UnsupportedModel` if it cannot be served, `InvalidRequest`
    if the checkpoint cannot be written.
    """
    _refuse_by_name(file)
    progress(f"reading {file.name}", 0.0)
    folder, seen = model_folder(), _stamp(file)
    checkpoint = folder / _name(file)
    if checkpoint.is_dir():
        return checkpoint
    try:
        with _locked(folder):
            if not checkpoint.is_dir():
                _unpack(file, checkpoint, progress, seen)
    except OSError as error:
        raise InvalidRequest(
            f"cannot unpack {file} into {folder}: {error}; TANDEM_MODEL_CACHE names another folder",
            param="model",
        ) from error
    return checkpoint


def _refuse_by_name(file: Path) -> None:
    if "mmproj" in file.name:
        raise UnsupportedModel(f"{file} is the image or audio part of a model; only text is served")
    if _PART.search(file.name):
        raise UnsupportedModel(
            f"{file} is a part of a model; join the parts into one file (llama-gguf-split --merge)"
        )


def _stamp(file: Path) -> tuple[int, ...]:
    """Another one if the file is replaced or written to; empty if there is none."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _name(file: Path) -> str:
    """From the content and the reader's version: another version may read it differently."""
    try:
        with file.open("rb") as stream:
            if stream.read(len(_MAGIC)) != _MAGIC:
                raise UnsupportedModel(f"{file} is no GGUF file; give one, or a model's directory")
            stream.seek(0)
            content = hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {file}", param="model") from error
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}: {error}", param="model") from error
    return f"{content[:32]}-{_FORMAT}-transformers-{version('transformers')}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unpack(file: Path, checkpoint: Path, progress: Progress, seen: tuple[int, ...]) -> None:
    # While the lock is held, no process writes these: they were left behind.
    for left in checkpoint.parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)
    from tandem.model.gguf_file import read_contents, write_checkpoint

    contents = read_contents(file)
    needed = contents.values * contents.dtype.itemsize + _ROOM_BYTES
    free = shutil.disk_usage(checkpoint.parent).free
    if free < needed:
        raise OSError(f"{needed / 2**20:,.0f} MiB are needed, {free / 2**20:,.0f} MiB are free")
    aside = checkpoint.with_name(f"{_PARTIAL}{os.getpid()}")  # others may read it, unlike `mkdtemp`
    aside.mkdir()
    try:
        write_checkpoint(file, contents, aside, progress)
        for each in (*aside.iterdir(), aside):
            _flush(each)
        if _stamp(file) != seen:  # the name is that of what it held before
            raise InvalidRequest(f"{file} changed while it was read; start again", param="model")
        aside.rename(checkpoint)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _flush(checkpoint.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
