"""Writes snapshots of trainers to disk beside the loop, one after the other.

A thread does what may block; the loop asks for what is done. Knows no registry and no executor.
Invariant: every snapshot that was begun comes back once, with a content hash or with an error.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from tandem.adapters.files import inspect_adapter
from tandem.core.errors import AdapterError, DiskError, TandemError
from tandem.core.ports import TrainerSnapshot


@dataclass(frozen=True, slots=True)
class Staged:
    """A snapshot that was to be written for `call`; `problem` says why it is not there."""

    call: int
    snapshot: TrainerSnapshot
    name: str
    path: str
    content_hash: str = ""
    problem: TandemError | None = None


class Stager:
    """The writing thread, started when it is first needed. Used by the loop's thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Staged | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Staged] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending = 0

    @property
    def busy(self) -> bool:
        """Whether something will come back."""
        return self._pending > 0

    def begin(self, call: int, snapshot: TrainerSnapshot, name: str, path: str) -> None:
        """Write `snapshot` to `path`; it comes back from `finished`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="staging", daemon=True)
            self._thread.start()
        self._pending += 1
        self._jobs.put(Staged(call, snapshot, name, path))

    def finished(self) -> list[Staged]:
        """What is written, or failed, since the last call. Never waits."""
        done: list[Staged] = []
        while self._pending and not self._done.empty():
            done.append(self._done.get())
            self._pending -= 1
        return done

    def close(self) -> None:
        """End the thread after what it is writing."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._done.put(_write(job))


def _write(job: Staged) -> Staged:
    try:
        job.snapshot.write(job.path)
        files = inspect_adapter(job.path)
    except OSError as error:
        failed = DiskError(f"cannot write {job.path}: {error}")
        return Staged(job.call, job.snapshot, job.name, job.path, problem=failed)
    except TandemError as error:
        return Staged(job.call, job.snapshot, job.name, job.path, problem=error)
    except Exception as error:
        problem = AdapterError(f"cannot write {job.path}: {error}", param="path")
        return Staged(job.call, job.snapshot, job.name, job.path, problem=problem)
    return Staged(job.call, job.snapshot, job.name, str(files.path), files.content_hash)
