"""Routes of OpenAI's files API: upload, list, retrieve, content, delete.

An upload is spooled by the form parser and copied in pieces; it is never whole in memory.
Invariant: a key sees its own files only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import FileResponse

from tandem.api.connection import as_json
from tandem.api.errors import BodyTooLarge
from tandem.api.paging import page_json, parse_number, read_limit, read_text
from tandem.api.surface import Surface
from tandem.core.errors import DiskError, InvalidRequest
from tandem.core.learning import FileRecord
from tandem.services.files import UPLOAD_PURPOSES

# How long a file is kept, if it says so: OpenAI's bounds.
LEAST_KEPT_S, MOST_KEPT_S = 3600, 2_592_000
_MOST = 10_000
_PART_BYTES = 1 << 20
_FORM_BYTES = 64 * 1024  # for what is in the form beside the file
_MAX_NAME_CHARS = 255
_DRAINED_TIMES = 4
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


def add_file_routes(app: FastAPI, surface: Surface) -> None:
    """Add /v1/files."""

    @app.post("/v1/files")
    async def upload_file(request: Request) -> Response:
        """Keep a file: multipart form with `file` and `purpose`."""
        form = await _read_form(request, surface.files.max_bytes + _FORM_BYTES)
        try:
            upload, purpose, kept_s = _fields(form)
            name = (upload.filename or "file")[:_MAX_NAME_CHARS]
            tenant: str = request.state.caller.tenant
            file = await surface.files.create(name, purpose, tenant, _parts(upload), kept_s)
        except OSError as error:
            raise DiskError(f"the file cannot be kept: {error}") from error
        finally:
            await form.close()
        return as_json(_file_json(file))

    @app.get("/v1/files")
    async def list_files(request: Request) -> Response:
        """Files of this key, newest first unless `order` is asc."""
        limit = read_limit(request, _MOST, _MOST)
        order = read_text(request, "order") or "desc"
        if order not in ("asc", "desc"):
            raise InvalidRequest("'order' must be asc or desc", param="order")
        found = await surface.files.listed(
            request.state.caller.tenant,
            purpose=read_text(request, "purpose"),
            after=read_text(request, "after"),
            ascending=order == "asc",
            limit=limit + 1,
        )
        return as_json(page_json([_file_json(file) for file in found], limit))

    @app.get("/v1/files/{file_id}")
    async def retrieve_file(file_id: str, request: Request) -> Response:
        """One of them."""
        return as_json(_file_json(await surface.files.find(file_id, request.state.caller.tenant)))

    @app.get("/v1/files/{file_id}/content")
    async def file_content(file_id: str, request: Request) -> Response:
        """Its bytes."""
        path = await surface.files.content(file_id, request.state.caller.tenant)
        return FileResponse(path, media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str, request: Request) -> Response:
        """Forget it."""
        await surface.files.delete(file_id, request.state.caller.tenant)
        return as_json({"id": file_id, "object": "file", "deleted": True})


async def _read_form(request: Request, limit_bytes: int) -> FormData:
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequest("send a form (multipart/form-data) with 'file' and 'purpose'")

    async def bounded() -> Any:
        size_bytes = 0
        async for part in request.stream():
            size_bytes += len(part)
            if size_bytes <= limit_bytes:
                yield part
            elif size_bytes > _DRAINED_TIMES * limit_bytes:
                break
        # Many clients read the answer only once they have sent everything: what is a little too
        # large is read to its end, or they would see a broken connection instead of the reason.
        if size_bytes > limit_bytes:
            raise BodyTooLarge(
                f"the file has more than {surface_limit} bytes; send less, or raise "
                "store.max_file_bytes",
                param="file",
            )

    surface_limit = limit_bytes - _FORM_BYTES
    parser = MultiPartParser(request.headers, bounded(), max_files=1, max_fields=8)
    try:
        return await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise InvalidRequest(f"the form cannot be read: {error}") from error
    except OSError as error:  # a large one is put aside on the disk
        raise DiskError(f"the file cannot be kept: {error}") from error


def _fields(form: FormData) -> tuple[UploadFile, str, float | None]:
    """The file, its purpose, and for how many seconds it is kept. Raises `InvalidRequest` that
    names the field."""
    for name in form:
        if name not in ("file", "purpose", _ANCHOR, _SECONDS):
            raise InvalidRequest(f"'{name[:100]}' is not supported; remove it", param=name[:100])
    upload, purpose = form.get("file"), form.get("purpose")
    if not isinstance(upload, UploadFile):
        raise InvalidRequest("missing required parameter: 'file'", param="file")
    if purpose not in UPLOAD_PURPOSES:
        known = ", ".join(UPLOAD_PURPOSES)
        raise InvalidRequest(f"'purpose' must be one of: {known}", param="purpose")
    return upload, str(purpose), _kept_s(form.get(_ANCHOR), form.get(_SECONDS))


def _kept_s(anchor: object, seconds: object) -> float | None:
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"'{_ANCHOR}' must be created_at", param=_ANCHOR)
    number = parse_number(seconds) if isinstance(seconds, str) else None
    if number is None or not LEAST_KEPT_S <= number <= MOST_KEPT_S:
        raise InvalidRequest(
            f"'{_SECONDS}' must be a whole number from {LEAST_KEPT_S} to {MOST_KEPT_S}",
            param=_SECONDS,
        )
    return float(number)


async def _parts(upload: UploadFile) -> AsyncIterator[bytes]:
    while part := await upload.read(_PART_BYTES):
        yield part


def _file_json(file: FileRecord) -> dict[str, Any]:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_s),
        "expires_at": None if file.expires_s is None else int(file.expires_s),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": file.status,
        "status_details": None,
    }
