"""Which packing a measurement chose, kept in a file so that a machine measures once.

Equal starts of a server then round alike, and so do its replicas on equal machines that share the
folder. The file lies beside the compiled kernels, so another processor, torch or kernel has another
file. Knows nothing of packings but their names. Invariant: a file that cannot be read or written
costs a measurement, never a start.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Container
from pathlib import Path

import msgspec

_NAME = "packings.json"

logger = logging.getLogger(__name__)


class SettledPackings:
    """The names by key, in a file of `folder`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME

    def find(self, key: str, among: Container[str], measure: Callable[[], str]) -> str:
        """The name for `key`, one of `among`; measured if none is kept.

        Processes that start together measure one after the other, so all have the first's result.
        """
        try:
            with self._path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                kept = self._read()
                if (name := kept.get(key)) is not None and name in among:
                    return name
                name = measure()
                self._write(kept | {key: name})
                return name
        except OSError as error:
            logger.warning("cannot keep the choice of a packing: %s", error)
            return measure()

    def _read(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, str])
        except (FileNotFoundError, msgspec.DecodeError):
            return {}

    def _write(self, kept: dict[str, str]) -> None:
        made = self._path.with_suffix(".partial")
        made.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
        made.replace(self._path)
