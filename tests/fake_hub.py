"""A hub on this machine: the few routes that looking up and downloading a repository ask for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

SHA = "1" * 40


class Hub(ThreadingHTTPServer):
    """Serves `folder` as the repository `name`; `asked` has every request, `down` answers 503."""

    daemon_threads = True

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.folder = name, folder
        self.asked: list[str] = []
        self.down = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def files(self) -> dict[str, bytes]:
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in sorted(paths)}


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        api, files = f"/api/models/{hub.name}", hub.files
        if hub.down:
            self._answer(503, b"")
        elif path in (api, f"{api}/revision/main"):
            siblings = [{"rfilename": name} for name in files]
            self._json({"id": hub.name, "sha": SHA, "siblings": siblings})
        elif path.startswith(f"{api}/tree/"):
            self._json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": _tag(content)}
                    for name, content in files.items()
                ]
            )
        elif (name := path.removeprefix(f"/{hub.name}/resolve/{SHA}/")) in files:
            self._answer(200, files[name], ETag=f'"{_tag(files[name])}"')
        else:
            self._answer(404, b"", **{"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode())

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _tag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(name: str, folder: Path) -> Iterator[Hub]:
    """A hub while the context is open."""
    hub = Hub(name, folder)
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
