"""API keys: who may use the server, and for what.

Knows digests only; a plain key is hashed when it is read and then forgotten. Invariant: checking
a key takes the same time whichever key it is compared with, and whether it matches or not.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tandem.core.errors import Forbidden, InvalidRequest, Unauthorized

BASE = "base"
_DIGEST_PREFIX = "sha256:"
_TENANT_DIGITS = 16

Cap = Annotated[int, msgspec.Meta(ge=0)]
Objective = Annotated[float, msgspec.Meta(gt=0.0)] | None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `serve` and `train` are patterns of adapter names (`formal*`).

    `tenant` tells callers apart: it salts KV blocks and owns files, feedback and receipts. The base
    model is called `base` in `serve`. Caps of 0 do not bound: `feedback_per_hour` counts what is
    accepted, `samples_cap` the samples that go into one adapter, ever. `ttft_slo` and `tpot_slo`,
    in seconds, are the objectives of requests that bring none. An administrator sees everybody's
    feedback and manages adapters.
    """

    tenant: str = ""
    name: str = ""
    serve: tuple[str, ...] = ("*",)
    train: tuple[str, ...] = ("*",)
    admin: bool = True
    feedback_per_hour: int = 0
    samples_cap: int = 0
    ttft_slo: float | None = None
    tpot_slo: float | None = None

    def may_see(self, adapter: str | None) -> bool:
        """Whether an adapter (None: the base model) is there for this caller: it may use, teach or
        manage it. Whoever teaches anything begins at the base model."""
        if self.admin or self.may_serve(adapter):
            return True
        return bool(self.train) if adapter is None else self.may_train(adapter)

    def may_serve(self, adapter: str | None) -> bool:
        """Whether this caller may use an adapter (None: the base model)."""
        return _matches(adapter or BASE, self.serve)

    def require_serve(self, adapter: str | None) -> None:
        """Raise `Forbidden` unless `may_serve`."""
        if not self.may_serve(adapter):
            what = f"the adapter '{adapter}'" if adapter else "the base model"
            raise Forbidden(f"this API key may not use {what}; ask for a key that may ('serve')")

    def may_train(self, adapter: str) -> bool:
        """Whether this caller may teach an adapter."""
        return _matches(adapter, self.train)

    def require_train(self, adapter: str) -> None:
        """Raise `Forbidden` unless `may_train`."""
        if not self.may_train(adapter):
            raise Forbidden(
                f"this API key may not train the adapter '{adapter}'; ask for a key that may "
                "('train')"
            )

    def require_admin(self) -> None:
        """Raise `Forbidden` unless this caller may manage the server."""
        if not self.admin:
            raise Forbidden("this API key may not manage adapters; ask for a key with 'admin'")


class ApiKeys:
    """The accepted keys; without any, every caller is accepted and may do everything."""

    def __init__(self, callers: Iterable[tuple[bytes, Caller]] = ()) -> None:
        self._callers = dict(callers)

    @classmethod
    def read(cls, keys: Iterable[str], file: str = "") -> ApiKeys:
        """Keys from flags and from a file: one key a line, or TOML if its name ends in `.toml`.

        A key is plain text or `sha256:` and the hex digest of it; it may do everything. Empty
        lines and lines that begin with `#` are skipped. In TOML each `[[keys]]` has `key` and what
        it may do: `name`, `serve` (default: all), `train` (default: nothing), `admin` (default:
        no), `feedback_per_hour`, `samples_cap`, `ttft_slo`, `tpot_slo`. Raises `InvalidRequest` if
        the file cannot be read or holds no key (a server that was meant to be closed must not come
        up open), and for a key that is given twice with different rights.
        """
        found = [_plain(key, "a key given by flag") for key in keys]
        if file:
            found += _read_file(Path(file))
        known: dict[bytes, Caller] = {}
        for digest, caller in found:
            if known.setdefault(digest, caller) != caller:
                raise InvalidRequest(
                    f"an API key of {file} is given by a flag too, with which it may do "
                    "everything; give each key once"
                )
        return cls(found)

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return bool(self._callers)

    def caller_of(self, authorization: str | None, api_key: str | None = None) -> Caller:
        """Check an `Authorization` header, or else `X-Api-Key`. Raises `Unauthorized`."""
        if not self._callers:
            return Caller()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            key = api_key or ""
        if not key.strip():
            raise Unauthorized(
                "this server needs an API key: send 'Authorization: Bearer <key>' or 'X-Api-Key'"
            )
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [known for known in self._callers if hmac.compare_digest(digest, known)]
        if not matches:
            raise Unauthorized("incorrect API key provided; check the key that you send")
        return self._callers[matches[0]]

    def of_tenant(self, tenant: str) -> Caller | None:
        """What the key of a tenant may do now; None if there is none any more. A server that needs
        no keys lets everybody do everything, under the tenant's own name."""
        if not self._callers:
            return Caller(tenant)
        return next((each for each in self._callers.values() if each.tenant == tenant), None)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One `[[keys]]` of a TOML file."""

    key: str
    name: str = ""
    serve: tuple[str, ...] = ("*",)
    train: tuple[str, ...] = ()
    admin: bool = False
    feedback_per_hour: Cap = 0
    samples_cap: Cap = 0
    ttft_slo: Objective = None
    tpot_slo: Objective = None

    def caller(self, tenant: str) -> Caller:
        return Caller(
            tenant,
            self.name,
            self.serve,
            self.train,
            self.admin,
            self.feedback_per_hour,
            self.samples_cap,
            self.ttft_slo,
            self.tpot_slo,
        )


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: tuple[_Entry, ...] = ()


def _read_file(path: Path) -> list[tuple[bytes, Caller]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the API key file {path}: {error}") from error
    found = _from_toml(text, path) if path.suffix == ".toml" else _from_lines(text, path)
    if not found:
        raise InvalidRequest(f"the API key file {path} holds no key; add one a line")
    return found


def _from_lines(text: str, path: Path) -> list[tuple[bytes, Caller]]:
    stripped = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [
        _plain(line, f"{path}, line {number}")
        for number, line in stripped
        if line and not line.startswith("#")
    ]


def _from_toml(text: str, path: Path) -> list[tuple[bytes, Caller]]:
    try:
        data: dict[str, Any] = tomllib.loads(text)
        entries = msgspec.convert(data, _KeyFile).keys
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"cannot read the API key file {path}: {error}") from error
    found: dict[bytes, Caller] = {}
    for place, entry in enumerate(entries, start=1):
        digest = _digest_of(entry.key, f"{path}, key {place}")
        if digest in found:
            first = list(found).index(digest) + 1
            raise InvalidRequest(f"{path}: key {place} is key {first} again; give each key once")
        found[digest] = entry.caller(_tenant(digest))
    return list(found.items())


def _plain(key: str, where: str) -> tuple[bytes, Caller]:
    digest = _digest_of(key, where)
    return digest, Caller(_tenant(digest))


def _tenant(digest: bytes) -> str:
    return digest.hex()[:_TENANT_DIGITS]


def _digest_of(key: str, where: str) -> bytes:
    key = key.strip()
    if key.startswith(_DIGEST_PREFIX):
        digits = key.removeprefix(_DIGEST_PREFIX)
        if not re.fullmatch(r"[0-9a-fA-F]{64}", digits):
            raise InvalidRequest(f"{where}: 'sha256:' must be followed by 64 hex digits")
        return bytes.fromhex(digits)
    if not key or not key.isascii() or any(character.isspace() for character in key):
        raise InvalidRequest(f"{where}: an API key is visible ASCII text without spaces")
    return hashlib.sha256(key.encode()).digest()


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
