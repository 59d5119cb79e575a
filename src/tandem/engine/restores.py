"""Brings adapters back into an engine that takes the place of one that has ended.

Knows the client's adapters and no request. Invariant: an adapter that clients see, and that only
found no memory, is tried again until it is back, or loaded or unloaded otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tandem.core.errors import NoMemory, OutOfMemory
from tandem.core.version import AdapterVersion
from tandem.engine.messages import CallResult, Command, Failure, LoadAdapter, to_exception

logger = logging.getLogger(__name__)

_AGAIN_S = 15.0


class Restores:
    """Of one client, whose `adapters` it changes; `number` gives the numbers of its calls."""

    def __init__(
        self,
        adapters: dict[str, AdapterVersion],
        number: Callable[[], int],
        send: Callable[[Command], None],
    ) -> None:
        self._adapters = adapters
        self._number = number
        self._send = send
        self._engines = 0
        self._under_way: dict[int, AdapterVersion] = {}
        self._missing: dict[str, AdapterVersion] = {}

    def begin(self) -> None:
        """A new engine is ready: it gets all adapters, in order, before any new request."""
        self._engines += 1
        self._under_way.clear()
        for version in (*self._adapters.values(), *self._missing.values()):
            self._load(version)

    def forget(self, name: str) -> None:
        """It was loaded, published or unloaded otherwise."""
        self._missing.pop(name, None)

    def take(self, answer: CallResult) -> None:
        """Whether an adapter is back; nothing if the answer is to another call."""
        version = self._under_way.pop(answer.call, None)
        if version is not None and answer.failure is not None:
            self._failed(version, answer.failure)
        elif version is not None and self._missing.pop(version.name, None) == version:
            self._adapters[version.name] = version

    def _failed(self, version: AdapterVersion, failure: Failure) -> None:
        name = version.name
        logger.error("lost adapter %s: %s", version.label, failure.message)
        missed = self._missing.pop(name, None) == version
        if self._adapters.get(name) == version:
            del self._adapters[name]
            missed = True
        short = isinstance(to_exception(failure), OutOfMemory | NoMemory)
        if missed and short and not version.internal:
            self._missing[name] = version
            loop = asyncio.get_running_loop()
            loop.call_later(_AGAIN_S, self._again, self._engines, version)

    def _again(self, engine: int, version: AdapterVersion) -> None:
        if engine == self._engines and self._missing.get(version.name) == version:
            self._load(version)

    def _load(self, version: AdapterVersion) -> None:
        call = self._number()
        self._under_way[call] = version
        self._send(LoadAdapter(call, version.name, version.path, version))
