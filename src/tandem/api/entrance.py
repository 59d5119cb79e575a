"""Which requests get in, whatever their route: the host they name, the page they come from, the
type of their body.

A browser sends what a foreign page asks for without asking first, as long as it looks like a form.
So bodies have the one type that their route takes, which a page may only send after a preflight;
a request of a page that was not allowed is refused; and on an address of this machine a request
has to name it, or any name that a stranger's DNS points here would do. On other addresses such a
name is no page of ours. Invariant: nothing here
knows a route but the uploads, so that a new one is covered.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from tandem.api.errors import UnsupportedMedia
from tandem.core.errors import Forbidden

UPLOADS = frozenset({"/v1/files"})
"""Routes whose POST takes a form with a file; all others take JSON."""
_LOCAL = frozenset(("localhost", "127.0.0.1", "[::1]"))
_CHANGING = frozenset(("POST", "PUT", "PATCH", "DELETE"))
_ANY = "*"
_PREFLIGHT_S = 600
_SHOWN = "x-request-id, x-tandem-adapter, retry-after, x-should-retry"


class Entrance:
    """The rules of one server.

    `hosts` are names beyond those of this machine; they are checked where the server listens on a
    loopback address, and wherever some are given. `origins` are the pages that browsers may let in
    (`*`: all). Without keys (`keyless`) all others' pages may change nothing.
    """

    def __init__(
        self, host: str, hosts: Sequence[str], origins: Sequence[str], *, keyless: bool
    ) -> None:
        own = f"[{host}]" if ":" in host else host
        given = {_name(each) for each in hosts}
        self._names = given | _LOCAL | {own.lower()}
        self._hosts = self._names if given or _is_loopback(host) else frozenset()
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._keyless = keyless

    def check_sender(self, scope: Scope, headers: Headers) -> None:
        """Raise `Forbidden` for a host that is not ours or a page that was not allowed."""
        host = headers.get("host")
        if self._hosts and host is not None and _name(host) not in self._hosts:
            raise Forbidden(
                f"this server is not called {host[:100]!r}; use its own address, or start it with "
                f"--allowed-host {_name(host)[:100]}"
            )
        origin = headers.get("origin")
        if origin is None or scope["method"] not in _CHANGING or not self._keyless:
            return
        if not (self._allows(origin) or self._is_own(origin, host or "")):
            raise Forbidden(
                f"pages of {origin[:100]!r} may not use this server; start it with --cors-origin "
                "and this origin to allow them, or with --allowed-host if that is its own name"
            )

    def answer_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """What an answer tells a browser: that the page that asked may read it."""
        if not self._origins:
            return []
        origin, vary = headers.get("origin"), (b"vary", b"Origin")
        if origin is None or not self._allows(origin):
            return [vary]
        return [
            vary,
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", _SHOWN.encode()),
        ]

    def preflight(self, scope: Scope, headers: Headers) -> dict[str, str] | None:
        """The answer's headers if this is a browser's question for a page that is allowed."""
        method, origin = headers.get("access-control-request-method"), headers.get("origin")
        if scope["method"] != "OPTIONS" or method is None or origin is None:
            return None
        if not self._allows(origin):
            return None
        wanted = headers.get("access-control-request-headers", "")
        granted = {
            "access-control-allow-methods": "GET, HEAD, POST, DELETE",
            "access-control-max-age": str(_PREFLIGHT_S),
        }
        if wanted:
            granted["access-control-allow-headers"] = wanted
        if "access-control-request-private-network" in headers:
            granted["access-control-allow-private-network"] = "true"
        return granted

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether a page is this server's own: its origin is the host that it asks, and no name
        that a stranger's DNS may point here."""
        name = _name(host)
        return _is_same(origin, host) and (name in self._names or _is_address(name))

    def _allows(self, origin: str) -> bool:
        return _ANY in self._origins or origin.lower() in self._origins


def check_media(scope: Scope, headers: Headers) -> None:
    """Raise `UnsupportedMedia` unless a body is of the type that its route takes, plain.

    A request that changes something without a body needs no type: a page's own would be refused
    by its origin.
    """
    if scope["method"] not in _CHANGING:
        return
    encodings = headers.getlist("content-encoding")
    if any(encoding.strip().lower() not in ("", "identity") for encoding in encodings):
        raise UnsupportedMedia(
            f"bodies with content-encoding {encodings[0][:50]!r} are not taken; send it plain",
            param="content-encoding",
        )
    upload = scope["method"] == "POST" and scope["path"] in UPLOADS
    wanted = "multipart/form-data" if upload else "application/json"
    types = headers.getlist("content-type")
    if not types and not _has_body(headers):
        return
    if len(types) != 1 or not _is_type(types[0], wanted):
        raise UnsupportedMedia(
            f"this route takes {wanted} in UTF-8, not {', '.join(types)[:100] or 'an unknown type'}"
            f"; send 'Content-Type: {wanted}'",
            param="content-type",
        )


def _is_type(given: str, wanted: str) -> bool:
    kind, *parameters = given.split(";")
    if kind.strip().lower() != wanted:
        return False
    named = (parameter.partition("=") for parameter in parameters)
    charsets = [value for name, _, value in named if name.strip().lower() == "charset"]
    return all(value.strip(" \t\"'").lower() in ("utf-8", "utf8") for value in charsets)


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0").strip() != "0" or "transfer-encoding" in headers


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_same(origin: str, host: str) -> bool:
    """Whether a page's origin is the server that it asks."""
    try:
        return bool(host) and urlsplit(origin).netloc.lower() == host.strip().lower()
    except ValueError:
        return False


def _name(host: str) -> str:
    """A `Host` without its port, comparable."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].rstrip(".")
