"""API keys: who may use the server.

Knows digests only; a plain key is hashed when it is read and then forgotten. Invariant: checking
a key takes the same time whichever key it is compared with, and whether it matches or not.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from tandem.core.errors import InvalidRequest, Unauthorized

_DIGEST_PREFIX = "sha256:"
_TENANT_DIGITS = 16


class ApiKeys:
    """The set of accepted keys; empty means that every caller is accepted."""

    def __init__(self, digests: Iterable[bytes] = ()) -> None:
        self._digests = tuple(dict.fromkeys(digests))

    @classmethod
    def read(cls, keys: Iterable[str], file: str = "") -> ApiKeys:
        """Keys from flags and from a file with one key a line.

        A key is plain text or `sha256:` and the hex digest of it; empty lines and lines that
        begin with `#` are skipped. Raises `InvalidRequest` if the file cannot be read or holds
        no key (a server that was meant to be closed must not come up open).
        """
        digests = [_digest_of(key, "a key given by flag") for key in keys]
        if file:
            digests += _read_file(Path(file))
        return cls(digests)

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return bool(self._digests)

    def tenant_of(self, authorization: str | None) -> str:
        """Check an `Authorization` header; the caller's tenant (salt of its KV blocks).

        Without configured keys all callers share the tenant "". Raises `Unauthorized`.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("this server needs an API key: send 'Authorization: Bearer <key>'")
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise Unauthorized("incorrect API key provided; check the key that you send")
        return digest.hex()[:_TENANT_DIGITS]


def _read_file(path: Path) -> list[bytes]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the API key file {path}: {error}") from error
    stripped = ((number, line.strip()) for number, line in enumerate(lines, start=1))
    digests = [
        _digest_of(line, f"{path}, line {number}")
        for number, line in stripped
        if line and not line.startswith("#")
    ]
    if not digests:
        raise InvalidRequest(f"the API key file {path} holds no key; add one a line")
    return digests


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
