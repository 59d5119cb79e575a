"""Which adapter versions exist, which one a name means now, and who still uses the old ones.

A request pins the version that was current when it came, and versions that it is switched to later.
Publishing or loading alone never changes a running answer. Invariant: a version is dropped exactly
when it is neither current under any name nor pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem.core.errors import AdapterError, NotFound
from tandem.core.version import AdapterVersion


@dataclass(slots=True)
class _Loaded:
    """One set of weights. Several names or version numbers may share it."""

    pins: int = 0
    names: int = 0


class AdapterRegistry:
    """Names -> current version, with pins by content. Called from the engine loop only.

    `load` and `drop` are the executor's. The others tell the cache about blocks of a content:
    `retire` that they may be evicted first, `revive` that the content is current again, `forget`
    that they must be dropped now.
    """

    def __init__(
        self,
        load: Callable[[AdapterVersion], None],
        drop: Callable[[str], None],
        *,
        retire: Callable[[str], None],
        revive: Callable[[str], None],
        forget: Callable[[str], None],
        max_loaded: int,
    ) -> None:
        self._load = load
        self._drop = drop
        self._retire = retire
        self._revive = revive
        self._forget = forget
        self._max_loaded = max_loaded
        self._current: dict[str, AdapterVersion] = {}
        self._numbers: dict[str, int] = {}
        self._loaded: dict[str, _Loaded] = {}

    @property
    def current(self) -> dict[str, AdapterVersion]:
        """Name -> current version."""
        return dict(self._current)

    def is_loaded(self, content_hash: str) -> bool:
        """Whether these weights are loaded, under any name."""
        return content_hash in self._loaded

    def publish(
        self, version: AdapterVersion, *, load: Callable[[AdapterVersion], None] | None = None
    ) -> AdapterVersion:
        """Load a version as the current one of its name, with the next number if its own is 0.

        If the content is already loaded under any name, nothing is read. `load` replaces the
        registry's own loading, for content that is in memory. Raises `AdapterError`; nothing has
        changed then.
        """
        name, content_hash = version.name, version.content_hash
        last = self._numbers.get(name, 0)
        version = replace(version, number=version.number or last + 1)
        previous = self._current.get(name)
        self._require_room(version)
        if content_hash in self._loaded:
            self._revive(content_hash)
        else:
            (load or self._load)(version)
            self._loaded[content_hash] = _Loaded()
        self._loaded[content_hash].names += 1
        self._numbers[name] = max(version.number, last)
        self._current[name] = version
        if previous is not None:
            self._unname(previous)
        return version

    def unload(self, name: str) -> None:
        """Remove a name. Raises `NotFound`."""
        self._unname(self._take(name))

    def pin(self, name: str | None, *, or_base: bool = False) -> AdapterVersion | None:
        """The current version of `name`, which stays loaded until `unpin`. If there is none, None
        with `or_base`; else raises `NotFound`."""
        if name is None:
            return None
        version = self._current.get(name)
        if version is None:
            if or_base:
                return None
            raise NotFound(f"there is no adapter {name!r}", param="model", code="model_not_found")
        self.pin_again(version)
        return version

    def pin_again(self, version: AdapterVersion) -> None:
        """Pin a loaded version once more."""
        self._loaded[version.content_hash].pins += 1

    def unpin(self, version: AdapterVersion | None) -> None:
        """Remove one pin."""
        if version is not None:
            self._loaded[version.content_hash].pins -= 1
            self._drop_if_unused(version.content_hash)

    def _require_room(self, version: AdapterVersion) -> None:
        """Check the limit for adapters served under other names. Pinned old versions and internal
        ones, such as candidates, do not count: they are dropped with the work that needs them."""
        if version.internal:
            return
        others = {
            each.content_hash
            for each in self._current.values()
            if not each.internal and each.name != version.name
        }
        if len(others | {version.content_hash}) > self._max_loaded:
            raise AdapterError(f"{self._max_loaded} adapters are loaded already; unload one first")

    def _take(self, name: str) -> AdapterVersion:
        version = self._current.pop(name, None)
        if version is None:
            raise NotFound(f"there is no adapter {name!r}", param="name")
        return version

    def _unname(self, version: AdapterVersion) -> None:
        loaded = self._loaded[version.content_hash]
        loaded.names -= 1
        if loaded.names == 0:
            self._retire(version.content_hash)
        self._drop_if_unused(version.content_hash)

    def _drop_if_unused(self, content_hash: str) -> None:
        loaded = self._loaded[content_hash]
        assert loaded.pins >= 0 and loaded.names >= 0
        if loaded.pins == 0 and loaded.names == 0:
            del self._loaded[content_hash]
            self._forget(content_hash)
            self._drop(content_hash)
