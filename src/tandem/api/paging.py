"""Pages of lists: how many are asked for, where a page continues, and its JSON."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from tandem.core.errors import InvalidRequest

MOST_NUMBER = (1 << 62) - 1  # of a version or an event; a database's integers end soon after
_MOST_DIGITS = len(str(MOST_NUMBER))


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
    number = parse_number(text)
    if not number:
        raise InvalidRequest(f"'{name}' must be a whole number above 0", param=name)
    return number


def parse_number(text: str) -> int | None:
    """The whole number that `text` is in digits; None if it is none or beyond `MOST_NUMBER`."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        return None
    return int(text) if int(text) <= MOST_NUMBER else None


def read_text(request: Request, name: str) -> str | None:
    """A short text, or None if it is not given. Raises `InvalidRequest` if it is empty: what a
    client wanted to send there is missing, and the first page again would be read for ever."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not text.strip():
        raise InvalidRequest(f"'{name}' is empty; leave it out", param=name)
    return text[:128]


def page_json(data: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of OpenAI's lists; `data` has one more than `limit` if there is more."""
    shown = data[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(data) > limit,
    }
