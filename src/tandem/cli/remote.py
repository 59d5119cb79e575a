"""A running server, as commands talk to it: requests, errors as one line, tables.

Knows the wire format only. Invariant: what a server sends is shown without its control characters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_CONNECT_TIMEOUT_S = 10.0
_TOO_MANY = 429
# An engine or a proxy's server that is not there just now.
_AWAY = (502, 503, 504)

Url = Annotated[
    str,
    typer.Option(help="Base URL of the server; without a path, its /v1", envvar="TANDEM_URL"),
]
Key = Annotated[str, typer.Option(help="API key", envvar=["TANDEM_API_KEY", "OPENAI_API_KEY"])]
DEFAULT_URL = "http://127.0.0.1:8000/v1"


class RemoteError(Exception):
    """The server refused or cannot be reached; the message is for the user."""


class Unreachable(RemoteError):
    """The server does not answer, or cannot just now; it may be asked again."""


class Busy(Unreachable):
    """The server is there and takes no more just now, of this caller or of all."""


class Remote:
    """One server; made by `connected`."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """The JSON at `path`. Raises `RemoteError`."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._json(self._send("GET", path, params=given))

    def metrics(self) -> str:
        """The text of `/metrics`, which lies beside `/v1`. Raises `RemoteError`."""
        return self._send("GET", "../metrics").text

    def post(
        self, path: str, body: dict[str, Any] | None = None, *, idempotency_key: str = ""
    ) -> dict[str, Any]:
        """Send JSON; sent again with the same key, it is done once. Raises `RemoteError`."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return self._json(self._send("POST", path, json=body or {}, headers=headers))

    def delete(self, path: str) -> dict[str, Any]:
        """Delete what is at `path`. Raises `RemoteError`."""
        return self._json(self._send("DELETE", path))

    def upload(self, path: Path, purpose: str) -> str:
        """Upload a file; its id. Raises `RemoteError`."""
        try:
            with path.open("rb") as stream:
                answer = self._send(
                    "POST", "files", files={"file": (path.name, stream)}, data={"purpose": purpose}
                )
        except OSError as error:
            raise RemoteError(f"cannot read {path}: {error}") from error
        return str(self._json(answer)["id"])

    def download(self, path: str, target: Path) -> int:
        """Write what is at `path` into a file, which changes once all of it is here; its bytes.
        Raises `RemoteError`."""
        # A device, a pipe, and a file in a folder that takes no other are written as they are.
        whole = target.resolve()  # a link to it stays
        as_it_is = target.exists() and not (target.is_file() and os.access(whole.parent, os.W_OK))
        whole = target if as_it_is else whole
        beside = whole if as_it_is else whole.with_name(f".tandem-{os.getpid()}.part")
        size_bytes = 0
        try:
            with self._http.stream("GET", path) as answer:
                if answer.is_error:
                    answer.read()
                    raise _refusal(answer)
                with beside.open("wb") as file:
                    for part in answer.iter_bytes():
                        size_bytes += file.write(part)
            if not as_it_is:
                beside.replace(whole)
        except httpx.HTTPError as error:
            raise Unreachable(f"cannot download to {target}: {error}") from error
        except (OSError, httpx.InvalidURL) as error:
            raise RemoteError(f"cannot download to {target}: {error}") from error
        finally:
            if not as_it_is:
                beside.unlink(missing_ok=True)
        return size_bytes

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            request = self._http.build_request(method, path, **options)
        except (httpx.InvalidURL, TypeError, ValueError) as error:  # no URL, or not JSON
            raise RemoteError(f"cannot ask for {path!r}: {error}") from error
        try:
            answer = self._http.send(request)
        except httpx.HTTPError as error:
            raise Unreachable(f"cannot reach {self._http.base_url}: {error}") from error
        if answer.is_error:
            raise _refusal(answer)
        return answer

    @staticmethod
    def _json(answer: httpx.Response) -> dict[str, Any]:
        try:
            body: dict[str, Any] = answer.json()
        except ValueError as error:
            raise RemoteError(f"{answer.url} did not answer with JSON: is it Tandem?") from error
        return body


def base_url(url: str) -> str:
    """`url` as requests need it: `http://` before a bare address, and `/v1`, where
    OpenAI-compatible servers have their routes, if it has no path. Raises `typer.BadParameter`."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(whole)
    except (ValueError, httpx.InvalidURL) as error:
        raise typer.BadParameter(f"{url!r}: {error}", param_hint="--url") from error
    if not usable:
        raise typer.BadParameter(
            f"{url!r} is no address of a server, as http://127.0.0.1:8000", param_hint="--url"
        )
    return f"{whole.rstrip('/')}/v1" if parts.path in ("", "/") else whole


def authorization(api_key: str) -> dict[str, str]:
    """The headers that show an API key. Raises `typer.BadParameter`."""
    if not api_key.isascii():
        raise typer.BadParameter("an API key is ASCII", param_hint="--api-key")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


@contextmanager
def connected(url: str, api_key: str) -> Iterator[Remote]:
    """A server for the length of a command; errors end it with one line and the code 1. Raises
    `typer.BadParameter`, and `BrokenPipeError` if the reader of the output is gone."""
    headers = authorization(api_key)
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    with httpx.Client(base_url=base_url(url), headers=headers, timeout=timeout) as http:
        try:
            yield Remote(http)
        except BrokenPipeError:  # of the standard output; the command line ends quietly
            raise
        except (RemoteError, OSError) as error:
            Console(stderr=True).print(Text(f"error: {plain(str(error))}", style="red"))
            raise typer.Exit(1) from None


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table of plain text; what does not fit its column is folded, not cut."""
    made = Table(*(Column(name, overflow="fold") for name in columns), box=None, pad_edge=False)
    for row in rows:
        made.add_row(*(Text(plain(str(cell))) for cell in row))
    return made


def number(value: object) -> str:
    """A measured value, or nothing."""
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)


def when(seconds: float) -> str:
    """A Unix time as a clock on the wall here shows it."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def plain(text: str) -> str:
    """Without control characters."""
    return "".join(c for c in text if c.isprintable() or c == "\n")


def _refusal(answer: httpx.Response) -> RemoteError:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {answer.status_code}"
    if answer.status_code == _TOO_MANY:
        return Busy(message)
    return Unreachable(message) if answer.status_code in _AWAY else RemoteError(message)
