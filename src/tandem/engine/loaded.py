"""The adapter versions of one loop: loading, publishing, unloading, and what requests pin.

Joins the registry of adapters, the executor and what requests hold. The loop waits for a disk only
where an adapter is loaded by path.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.adapters.files import inspect_adapter
from tandem.adapters.registry import AdapterRegistry
from tandem.core.errors import AdapterError, NotFound
from tandem.core.ports import Executor, TrainerSnapshot
from tandem.core.version import AdapterVersion
from tandem.engine.holds import Holds
from tandem.scheduling.scheduler import Scheduler


class LoadedAdapters:
    """Current versions by name. With `switch`, requests in flight continue with each new version of
    their adapter (MACE); scores never do.

    `registry` and `holds` are for the loop, which pins the versions of requests.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, most: int, switch: bool
    ) -> None:
        self._scheduler, self._executor, self._switch = scheduler, executor, switch
        cache = scheduler.cache
        self.registry = AdapterRegistry(
            lambda version: self._read(version)(version),
            executor.drop_adapter,
            retire=cache.retire,
            revive=lambda content_hash: cache.retire(content_hash, retired=False),
            forget=cache.drop_adapter,
            max_loaded=most,
        )
        self.holds = Holds(self.registry, scheduler.is_active)

    @property
    def current(self) -> dict[str, AdapterVersion]:
        """Current versions by name."""
        return self.registry.current

    def is_loaded(self, version: AdapterVersion) -> bool:
        """Whether publishing this version reads no file."""
        return self.registry.is_loaded(version.content_hash)

    def load(self, name: str, path: str, restore: AdapterVersion | None = None) -> AdapterVersion:
        """Make the files at `path` the current version of `name`. Raises `AdapterError`.

        With `restore`, that version becomes current again, or an error if its files have changed.
        """
        return self.read(name, path, restore)()

    def read(
        self, name: str, path: str, restore: AdapterVersion | None = None
    ) -> Callable[[], AdapterVersion]:
        """The blocking part of `load`, for any thread; calling the result does the rest."""
        files = inspect_adapter(path)
        if restore is not None and files.content_hash != restore.content_hash:
            raise AdapterError(f"the files of {restore.label} at {path} have changed; load it anew")
        number = restore.number if restore is not None else 0
        return self.read_version(AdapterVersion(name, number, files.content_hash, str(files.path)))

    def publish(
        self, version: AdapterVersion, load: Callable[[AdapterVersion], None] | None = None
    ) -> AdapterVersion:
        """Make `version` current. If its content is not loaded, `load` brings it (None: its files
        are read). Raises `AdapterError`.

        With `switch`, requests of this name continue with the version, even those whose version was
        unloaded meanwhile.
        """
        version = self.registry.publish(version, load=load)
        if self._switch:
            self.holds.switch(version, self._scheduler.switch_adapter)
        return version

    def read_version(self, version: AdapterVersion) -> Callable[[], AdapterVersion]:
        """The blocking part of `publish`, for any thread; its result does the rest."""
        put = None if self.is_loaded(version) else self._read(version)
        return lambda: self.publish(version, load=put)

    def adopt(
        self, snapshot: TrainerSnapshot, name: str, path: str, content_hash: str
    ) -> AdapterVersion:
        """Make a trainer's snapshot that was written to `path` the current version of `name`.

        Reads no file. Raises `AdapterError`.
        """
        return self.publish(
            AdapterVersion(name, 0, content_hash, path),
            load=lambda version: self._executor.adopt(snapshot, version.content_hash),
        )

    def unload(self, name: str) -> None:
        """Remove a name. Raises `NotFound`."""
        if name not in self.registry.current:
            raise NotFound(f"there is no adapter {name!r}", param="name")
        self.registry.unload(name)

    def _read(self, version: AdapterVersion) -> Callable[[AdapterVersion], None]:
        """Read the files of `version`, and check that they still have its hash."""
        put = self._executor.read_adapter(version)
        if inspect_adapter(version.path).content_hash != version.content_hash:
            raise AdapterError(f"{version.path} changed while it was being read; load it again")
        return lambda _: put()
