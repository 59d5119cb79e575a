"""Query parameters of lists: how many, and where a page continues."""

from __future__ import annotations

from starlette.requests import Request

from tandem.core.errors import InvalidRequest


def read_limit(request: Request, default: int, most: int) -> int:
    """`limit`, from 1 to `most`. Raises `InvalidRequest`."""
    limit = read_number(request, "limit")
    if limit is None:
        return default
    if not 1 <= limit <= most:
        raise InvalidRequest(f"'limit' must be from 1 to {most}", param="limit")
    return limit


def read_number(request: Request, name: str) -> int | None:
    """A whole number above 0, or None if it is not given. Raises `InvalidRequest`."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 62):
        raise InvalidRequest(f"'{name}' must be a whole number above 0", param=name)
    return int(text)


def read_text(request: Request, name: str) -> str | None:
    """A short text, or None if it is not given."""
    text = request.query_params.get(name)
    return text[:128] if text else None
