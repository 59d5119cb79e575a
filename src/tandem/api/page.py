"""The page at `/`, and the files that it is made of.

Files of the package, read once: a browser gets what this server was started with. Knows nothing of
what the page does: it uses the routes that everybody uses, with the key that its user types.
Invariant: the page loads nothing from another host, and no other site can put it into a frame.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response

from tandem.api.guard import PAGE_FILES
from tandem.api.surface import Surface
from tandem.core.errors import NotFound

_FOLDER = Path(__file__).parent / "web"
_INDEX = "index.html"
# Tells the page whether to ask for a key, so that it need not be refused first.
_NO_KEY, _NEEDS_KEY = b'data-key="none"', b'data-key="required"'
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def add_page_routes(app: FastAPI, surface: Surface) -> None:
    """Add `/` and its files."""
    files = {
        path.name: _file(path.read_bytes(), path.suffix)
        for path in _FOLDER.iterdir()
        if path.suffix in _TYPES
    }
    if surface.keys.required:
        marked = files[_INDEX].content.replace(_NO_KEY, _NEEDS_KEY)
        files[_INDEX] = _file(marked, ".html")

    @app.get("/")
    async def page(request: Request) -> Response:
        """The page: chat, learning, iterations, batches and jobs."""
        return _answer(request, files[_INDEX])

    @app.get(PAGE_FILES + "{file}")
    async def page_file(file: str, request: Request) -> Response:
        """A file of the page."""
        if file not in files:
            raise NotFound(f"the page has no file '{file[:64]}'", param="file")
        return _answer(request, files[file])


def _file(content: bytes, suffix: str) -> _File:
    return _File(content, _TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')


def _answer(request: Request, file: _File) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
