"""Routes about adapters: those that learn, with their versions, and those that are only loaded.

Invariant: whatever changes what others are answered needs a key with `admin`. An adapter that a
caller may not see is not there for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi import Path as PathParameter
from pydantic import Field
from starlette.background import BackgroundTask
from starlette.responses import FileResponse

from tandem.api.connection import as_json, read, who_asks
from tandem.api.paging import MOST_NUMBER, read_limit, read_number
from tandem.api.schemas import WORD, Body, LoadAdapterRequest
from tandem.api.surface import Surface
from tandem.core.errors import InvalidRequest, NotFound
from tandem.core.learning import EventRecord, VersionRecord
from tandem.core.version import AdapterVersion
from tandem.services.learning.settings import LearningSettings
from tandem.services.versions.adapters import Adapters
from tandem.services.versions.imports import Imports
from tandem.services.versions.service import AdapterView, Versions

_MOST_EVENTS = 100

Number = Annotated[int, PathParameter(ge=0, le=MOST_NUMBER)]


class AdapterRequest(Body):
    """Body of POST /v1/adapters/{name}."""

    settings: Annotated[dict[str, Any], Field(default_factory=dict)]


class RollBackRequest(Body):
    """Body of a roll back; without `version` to the parent of the current one."""

    version: Annotated[int, Field(ge=0, le=MOST_NUMBER)] | None = None


class ImportRequest(Body):
    """Body of an import: a directory below the allowed roots, or an uploaded zip."""

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    file_id: Annotated[str, Field(min_length=1, max_length=128, pattern=WORD)] | None = None


def add_adapter_routes(app: FastAPI, surface: Surface) -> None:
    """Add /v1/adapters."""
    _add_loading(app, surface)
    _add_versions(app, surface)
    _add_changes(app, surface)


def _add_loading(app: FastAPI, surface: Surface) -> None:
    @app.get("/v1/adapters")
    async def list_adapters(request: Request) -> Response:
        """Adapters that learn or are loaded and that the caller may see, by name."""
        loaded = {version.name: version for version in surface.adapters.listed()}
        views = {} if surface.versions is None else await _views(surface.versions)
        names = sorted(filter(who_asks(request).may_see, loaded.keys() | views.keys()))
        listed = [_adapter_json(surface, name, loaded.get(name), views.get(name)) for name in names]
        return as_json({"object": "list", "data": listed})

    @app.get("/v1/adapters/{name}")
    async def retrieve_adapter(name: str, request: Request) -> Response:
        """One of them."""
        _require_seen(request, name)
        loaded = {version.name: version for version in surface.adapters.listed()}
        views = {} if surface.versions is None else await _views(surface.versions)
        if name not in loaded.keys() | views.keys():
            raise _unknown(name)
        return as_json(_adapter_json(surface, name, loaded.get(name), views.get(name)))

    @app.post("/v1/adapters/{name}/load")
    async def load_adapter(name: str, request: Request) -> Response:
        """Load a PEFT directory as the new current version of this name."""
        who_asks(request).require_admin()
        body = await read(LoadAdapterRequest, request, surface.bodies)
        versions = surface.versions
        loading: Adapters | Imports = versions.imports if versions else surface.adapters
        version = await loading.load(name, body.path)
        return as_json(_adapter_json(surface, name, version, None))

    @app.delete("/v1/adapters/{name}")
    async def delete_adapter(name: str, request: Request) -> Response:
        """Forget a name, its versions and files; requests that run with it finish."""
        who_asks(request).require_admin()
        await forget(surface, name)
        return as_json({"id": name, "object": "adapter", "deleted": True})


def _add_versions(app: FastAPI, surface: Surface) -> None:
    @app.get("/v1/adapters/{name}/versions")
    async def list_versions(name: str, request: Request) -> Response:
        """Versions of an adapter, newest first, with what the gate measured."""
        _require_seen(request, name)
        listed = await _learning(surface).versions(name)
        current = (await _learning(surface).find(name)).record.current
        data = [_version_json(version, current) for version in listed]
        return as_json({"object": "list", "data": data})

    @app.get("/v1/adapters/{name}/events")
    async def list_adapter_events(name: str, request: Request) -> Response:
        """History of an adapter, newest first; `before` continues a page."""
        _require_seen(request, name)
        await _learning(surface).find(name)
        limit = read_limit(request, 20, _MOST_EVENTS)
        before = read_number(request, "before")
        found = await _learning(surface).events(name, before, limit + 1)
        data = [_event_json(event) for event in found[:limit]]
        return as_json({"object": "list", "data": data, "has_more": len(found) > limit})

    @app.get("/v1/adapters/{name}/versions/{version}/export")
    async def export_version(name: str, version: Number, request: Request) -> Response:
        """A zip of the version's PEFT files."""
        who_asks(request).require_admin()
        archive = await _learning(surface).archive(name, version)
        return FileResponse(
            archive,
            media_type="application/zip",
            filename=f"{name}-{version}.zip",
            background=BackgroundTask(archive.unlink),
        )


def _add_changes(app: FastAPI, surface: Surface) -> None:
    @app.post("/v1/adapters/{name}")
    async def create_adapter(name: str, request: Request) -> Response:
        """Make an adapter that learns, or replace its settings."""
        who_asks(request).require_admin()
        body = await read(AdapterRequest, request, surface.bodies)
        view = await _learning(surface).create(name, body.settings)
        loaded = {version.name: version for version in surface.adapters.listed()}
        return as_json(_adapter_json(surface, name, loaded.get(name), view))

    @app.post("/v1/adapters/{name}/versions/{version}/publish")
    async def publish_version(name: str, version: Number, request: Request) -> Response:
        """Approve a candidate, overrule a refusal, or make a published version answer again."""
        who_asks(request).require_admin()
        published = await _learning(surface).publish(name, version)
        return as_json(_version_json(published, version))

    @app.post("/v1/adapters/{name}/versions/{version}/refuse")
    async def refuse_version(name: str, version: Number, request: Request) -> Response:
        """Give up a candidate that waits for a decision."""
        who_asks(request).require_admin()
        refused = await _learning(surface).refuse(name, version)
        current = (await _learning(surface).find(name)).record.current
        return as_json(_version_json(refused, current))

    @app.delete("/v1/adapters/{name}/versions/{version}")
    async def delete_version(name: str, version: Number, request: Request) -> Response:
        """Forget a version and its files; never the current one."""
        who_asks(request).require_admin()
        await _learning(surface).delete_version(name, version)
        label = f"{name}@{version}"
        return as_json({"id": label, "object": "adapter.version", "deleted": True})

    @app.post("/v1/adapters/{name}/rollback")
    async def roll_back(name: str, request: Request) -> Response:
        """Go back to an earlier version; what was being trained is given up."""
        who_asks(request).require_admin()
        body = await read(RollBackRequest, request, surface.bodies)
        number = await _learning(surface).roll_back(name, body.version)
        return as_json({"id": name, "object": "adapter", "version": number})

    @app.post("/v1/adapters/{name}/import")
    async def import_version(name: str, request: Request) -> Response:
        """Publish PEFT files from elsewhere as the next version; learning continues from it."""
        caller = who_asks(request)
        caller.require_admin()
        body = await read(ImportRequest, request, surface.bodies)
        if (body.path is None) == (body.file_id is None):
            raise InvalidRequest("send either 'path' or 'file_id'", param="path")
        imports = _learning(surface).imports
        if body.file_id is not None:
            archive = await imports.uploaded(body.file_id, caller.tenant)
            imported = await imports.archive(name, archive, surface.files.max_bytes)
        else:
            imported = await imports.directory(name, body.path or "")
        return as_json(_version_json(imported, imported.number))


async def forget(surface: Surface, name: str) -> None:
    """Delete an adapter with all that is its own. Raises `NotFound`."""
    if surface.versions is not None:
        await surface.versions.delete(name)
    else:
        await surface.adapters.unload(name)


def _learning(surface: Surface) -> Versions:
    if surface.versions is None:
        raise InvalidRequest("learning is off on this server (--learning)")
    return surface.versions


async def _views(versions: Versions) -> dict[str, AdapterView]:
    return {view.record.name: view for view in await versions.listed()}


def _require_seen(request: Request, name: str) -> None:
    if not who_asks(request).may_see(name):
        raise _unknown(name)


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no adapter '{name[:64]}'", param="name")


def _adapter_json(
    surface: Surface, name: str, version: AdapterVersion | None, view: AdapterView | None
) -> dict[str, Any]:
    """`version` is what answers (None: the base), `view` what is kept of an adapter that learns."""
    found: dict[str, Any] = {
        "id": name,
        "object": "adapter",
        "model": surface.models.id_of(name),
        "version": version.number if version else 0,
        "label": version.label if version else "base",
        "content_hash": version.content_hash if version else None,
        "learning": None,
    }
    if view is not None:
        found["learning"] = {
            "created_at": int(view.record.created_s),
            "settings": _settings_json(view.settings),
            "own_settings": view.record.settings,
            "samples": _counts(view.samples),
        }
    return found


def _settings_json(settings: LearningSettings) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(settings)
    return found


def _counts(samples: Mapping[Any, Mapping[Any, int]]) -> dict[str, dict[str, int]]:
    return {
        split.value: {state.value: number for state, number in states.items()}
        for split, states in samples.items()
    }


def _version_json(version: VersionRecord, current: int) -> dict[str, Any]:
    return {
        "object": "adapter.version",
        "adapter": version.adapter,
        "version": version.number,
        "label": f"{version.adapter}@{version.number}",
        "state": version.state.value,
        "current": version.number == current,
        "parent": version.parent,
        "origin": version.origin,
        "created_at": int(version.created_s),
        "content_hash": version.content_hash,
        "metrics": version.metrics,
        "reason": version.reason or None,
        "tainted": version.tainted,
        "watched": version.watched,
    }


def _event_json(event: EventRecord) -> dict[str, Any]:
    return {
        "object": "adapter.event",
        "id": event.number,
        "created_at": int(event.created_s),
        "level": event.level,
        "message": event.message,
        "data": event.data,
    }
