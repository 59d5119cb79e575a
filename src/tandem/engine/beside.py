"""Work beside the loop: reading adapters and trainers, writing snapshots of trainers, compiling.

A thread does what may block, one piece at a time. The loop collects finished pieces and concludes
them. Knows no registry and no executor. Invariant: every piece that was begun comes back once, with
what is left to do in the loop's thread or with an error.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem.adapters.files import inspect_adapter
from tandem.core.errors import AdapterError, DiskError, TandemError
from tandem.core.ports import TrainerSnapshot
from tandem.core.training import TrainerState
from tandem.core.version import AdapterVersion

Key = TypeVar("Key")
Conclude = Callable[[], AdapterVersion | TrainerState | None]
"""The rest of a piece, done in the loop's thread. Raises the piece's error if it failed."""


@dataclass(frozen=True, slots=True)
class _Piece(Generic[Key]):
    key: Key
    work: Callable[[], Conclude]


class Beside(Generic[Key]):
    """One thread, started when first needed. Used by the loop's thread. `Key` says for whom a
    piece is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pieces: queue.SimpleQueue[_Piece[Key] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Key, Conclude]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending = 0
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a piece has not come back yet."""
        return self._pending > 0

    def begin(self, key: Key, work: Callable[[], Conclude]) -> None:
        """Do `work` for `key` in the thread. `finished` returns its result."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._pending += 1
        self._pieces.put(_Piece(key, work))

    def finished(self) -> list[tuple[Key, Conclude]]:
        """Keys whose work is done or has failed since the last time. Never waits."""
        done: list[tuple[Key, Conclude]] = []
        while self._pending and not self._done.empty():
            done.append(self._done.get())
            self._pending -= 1
        return done

    def close(self, *, wait: bool = True) -> None:
        """End the thread after its current piece, which may take long."""
        if self._thread is not None:
            self._closed = True
            self._pieces.put(None)
            if wait:
                self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None and not self._closed:
            self._done.put((piece.key, _concluded(piece.work)))


def write_snapshot(snapshot: TrainerSnapshot, path: str) -> tuple[str, str]:
    """Write a snapshot to `path`; returns the resolved path and the content hash. Blocks. Raises
    `DiskError` and `AdapterError`."""
    try:
        snapshot.write(path)
        files = inspect_adapter(path)
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error}") from error
    except TandemError:
        raise
    except Exception as error:
        raise AdapterError(f"cannot write {path}: {error}", param="path") from error
    return str(files.path), files.content_hash


def _concluded(work: Callable[[], Conclude]) -> Conclude:
    """A function of its own, so that a thread that waits keeps nothing of its last piece."""
    try:
        return work()
    except Exception as error:
        return _raising(error)


def _raising(error: Exception) -> Conclude:
    def conclude() -> AdapterVersion:
        raise error

    return conclude
