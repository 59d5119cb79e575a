"""What all batches of a server work with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.core.ports import ServingEngine
from tandem.services.answering.models import Models
from tandem.services.auth import ApiKeys
from tandem.services.batches.pool import Pool
from tandem.services.batches.reply import Respond
from tandem.services.files import Files
from tandem.services.passed import Passed
from tandem.store import Store


@dataclass(frozen=True, slots=True)
class BatchTools:
    """`most_lines` and `most_file_bytes` bound a file, `most_bytes`
    one line of it; `now` is in seconds since the epoch, and `passed` what is believed of it."""

    store: Store
    files: Files
    client: ServingEngine
    models: Models
    keys: ApiKeys
    respond: Respond
    pool: Pool
    most_lines: int
    most_file_bytes: int
    most_bytes: int
    now: Callable[[], float]
    passed: Passed
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the lines of an input file are read: one file at a time."""
    few: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(8))
    alone: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Held while a line is answered that may be what kills the engine: few of such, or one."""
