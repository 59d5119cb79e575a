"""Lets one engine of a group have the adapters of the main one.

Compares what both have and mends the difference, one call at a time: after every change, and every
second for changes that nobody tells of, such as a restart. Knows adapters only. Invariants: nothing
that fails here reaches a caller; a version counts as settled only while no change of its name is on
its way to the engine, and only if this engine process has confirmed it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from tandem.core.errors import EngineDead
from tandem.core.ports import EngineState, ServingEngine
from tandem.core.version import AdapterVersion

logger = logging.getLogger(__name__)

# An engine that ends takes longer to be ready again, so the end is seen between two looks.
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
        self._settled: dict[str, AdapterVersion] = {}
        self._warnings: dict[str, str] = {}  # the last one of each adapter

    def changed(self) -> None:
        """What is wanted may have changed."""
        self._changed.set()

    def has(self, version: AdapterVersion) -> bool:
        """Whether a request for its name that is sent now is answered by `version`."""
        return self._settled.get(version.name) == version

    async def run(self) -> None:
        """Follow until this is cancelled."""
        while True:
            self._changed.clear()
            if self._engine.state is EngineState.READY:
                await self._follow()
            else:
                self._settled.clear()  # the next process may fail to load them
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._changed.wait()

    async def _follow(self) -> None:
        surplus = self._engine.adapters.keys() - self._wanted().keys()
        for name in (*surplus, *self._wanted()):  # the surplus first, since that makes room
            await self._mend(name)
        known = self._engine.adapters.keys() | self._wanted().keys()
        self._warnings = {name: text for name, text in self._warnings.items() if name in known}

    async def _mend(self, name: str) -> None:
        """Make what the engine has of `name` what is wanted of it now.

        A failure is logged once, and tried again at the next look.
        """
        current, wanted = self._engine.adapters.get(name), self._wanted().get(name)
        version = wanted or current
        if version is None or current == wanted == self._settled.get(name):
            return
        self._settled.pop(name, None)
        try:
            if wanted is None:
                await self._engine.unload_adapter(name)
            else:
                self._settled[name] = await self._engine.publish_adapter(wanted)
        except Exception as error:
            if isinstance(error, EngineDead):
                self._settled.clear()
            warning = f"{version.label}: {error}"
            if self._warnings.get(name) != warning:
                self._warnings[name] = warning
                logger.warning("the %s engine does not follow in %s", self._name, warning)
        else:
            self._warnings.pop(name, None)
