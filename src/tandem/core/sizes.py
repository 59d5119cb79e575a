"""Numbers of bytes as people write them: `512MiB`."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+)\s*([kmgt]?)i?b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def bytes_of(text: str) -> int:
    """Bytes of `512MiB`, `4g` or `1000`; prefixes are powers of 1024. Raises `ValueError`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a size such as 512MiB or 4GiB (given: {text!r:.50})")
    factor: int = 1024 ** _POWERS[match[2].lower()]
    return int(match[1]) * factor


def shown_size(size: int) -> str:
    """As `bytes_of` reads it."""
    for power, prefix in reversed(list(enumerate(("", "Ki", "Mi", "Gi", "Ti")))):
        if power and size and size % 1024**power == 0:
            return f"{size // 1024**power}{prefix}B"
    return str(size)
