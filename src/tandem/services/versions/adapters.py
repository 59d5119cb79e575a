"""Loading and unloading LoRA adapters by name, from directories that the operator allowed.

Paths come from clients, so they are resolved (links followed) before they are compared with the
whitelist. Invariant: no file outside the whitelist is ever named to the engine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tandem.core.errors import AdapterError, InvalidRequest, NotFound
from tandem.core.ports import ServingEngine
from tandem.core.version import INTERNAL, AdapterVersion
from tandem.services.auth import BASE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Adapters:
    """The adapters of the engine, seen from outside.

    `roots` are directories below which adapters may be loaded; `preload` (name -> directory) are
    those given at start, which may be loaded again. Raises `InvalidRequest` for a wrong name.
    """

    def __init__(
        self, client: ServingEngine, roots: Sequence[str], preload: Mapping[str, str]
    ) -> None:
        self._client = client
        self._roots = tuple(Path(root).resolve() for root in roots)
        for name in preload:
            check_name(name)
        self._preload = {name: Path(path).resolve() for name, path in preload.items()}

    def listed(self) -> list[AdapterVersion]:
        """Current versions, by name."""
        return [
            version
            for name, version in sorted(self._client.adapters.items())
            if not name.startswith(INTERNAL)
        ]

    async def load(self, name: str, path: str | None = None) -> AdapterVersion:
        """Make the PEFT directory at `path` the current version of `name`.

        A relative path is looked up below each root; without a path the directory is the one
        given for this name at start, else the one that has this name below a root. Raises
        `InvalidRequest`, or `AdapterError` if the files do not fit.
        """
        check_name(name)
        directory = await self.directory(name, path)
        with without_path(directory):
            return await self._client.load_adapter(name, str(directory))

    async def unload(self, name: str) -> AdapterVersion:
        """Remove `name`; running requests finish with it. Raises `NotFound`."""
        check_name(name)
        version = self._client.adapters.get(name)
        if version is None:
            known = ", ".join(each.name for each in self.listed()) or "none"
            raise NotFound(f"no adapter is loaded as '{name}'; loaded: {known}", param="name")
        await self._client.unload_adapter(name)
        return version

    async def directory(self, name: str, path: str | None) -> Path:
        """The directory that `load` would read. Raises `InvalidRequest`."""
        return await asyncio.to_thread(self._allowed, name, path)

    def _allowed(self, name: str, path: str | None) -> Path:
        if path is None and name in self._preload:
            return self._preload[name]
        asked = Path(name if path is None else path)
        if "\0" in str(asked):
            raise InvalidRequest("path must not contain a null character", param="path")
        try:
            for root in self._roots:
                directory = (root / asked).resolve()  # an absolute path replaces the root
                if directory.is_relative_to(root) and directory.is_dir():
                    return directory
            if asked.is_absolute() and asked.resolve() in self._preload.values():
                return asked.resolve()
        except (OSError, ValueError, RuntimeError):
            pass  # too long, no name in this file system, or links in a circle: no directory
        raise InvalidRequest(self._refusal(asked), param="path", code="path_not_allowed")

    def _refusal(self, asked: Path) -> str:
        if not self._roots:
            return (
                "loading adapters over HTTP is off: start the server with --adapter-root DIR "
                "to allow directories below DIR"
            )
        return (
            f"{str(asked)[:200]!r} is not a directory below the allowed adapter roots "
            "(--adapter-root)"
        )


@contextmanager
def without_path(directory: Path) -> Iterator[None]:
    """Errors about an adapter do not tell clients where this server keeps it."""
    try:
        yield
    except AdapterError as error:
        told = str(error).replace(str(directory), "the adapter")
        raise AdapterError(told, param=error.param, code=error.code) from error


def check_name(name: str) -> None:
    """Raise `InvalidRequest` unless `name` can be a part of a model id."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            "an adapter name has 1 to 64 characters out of letters, digits, '.', '_' and '-' and "
            "begins with a letter or digit",
            param="name",
        )
    if name == BASE:
        raise InvalidRequest(f"'{BASE}' means the model itself; choose another name", param="name")
