"""Lets one engine of a group have the adapters of the main one.

Compares what both have and mends the difference, one call at a time: after every change, and every
second for changes that nobody tells of, such as a restart. Knows adapters only. Invariant: nothing
that fails here reaches a caller; until the versions agree, the main engine answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from tandem.core.ports import EngineState, ServingEngine
from tandem.core.version import AdapterVersion

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class Following:
    """One engine, called `name`, that is to have what `wanted` says."""

    def __init__(
        self, name: str, engine: ServingEngine, wanted: Callable[[], Mapping[str, AdapterVersion]]
    ) -> None:
        self._name = name
        self._engine = engine
        self._wanted = wanted
        self._changed = asyncio.Event()
        self._told: dict[str, str] = {}

    def changed(self) -> None:
        """What is wanted may have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Follow until this is cancelled."""
        while True:
            self._changed.clear()
            if self._engine.state is EngineState.READY:
                await self._follow()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._changed.wait()

    async def _follow(self) -> None:
        has, wanted = self._engine.adapters, self._wanted()
        for name in has.keys() - wanted.keys():  # first, since it makes room
            await self._try(name, self._engine.unload_adapter(name))
        for name, version in wanted.items():
            if has.get(name) != version:
                await self._try(version.label, self._engine.publish_adapter(version))
        known = has.keys() | wanted.keys()
        self._told = {name: told for name, told in self._told.items() if name in known}

    async def _try(self, label: str, change: Coroutine[Any, Any, object]) -> None:
        """Make a change; a failure is told once, and tried again at the next look."""
        name = label.partition("@")[0]
        try:
            await change
        except Exception as error:
            told = f"{label}: {error}"
            if self._told.get(name) != told:
                self._told[name] = told
                logger.warning("the %s engine does not follow in %s", self._name, told)
        else:
            self._told.pop(name, None)
